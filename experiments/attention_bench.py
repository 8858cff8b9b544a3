"""Attention by shape: torch's kernels and attention in blocks. PYTHONPATH=src python experiments/attention_bench.py OUT"""

import json
import sys

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from megabatch.models import block_attention as ba

SHAPES = {
    "ViT-L-14": (512, 257, 16, 64, False),
    "ViT-B-16": (1024, 197, 12, 64, False),
    "texts of 77": (2048, 77, 12, 64, True),
    "65": (2048, 65, 12, 64, False),
    "129": (1024, 129, 12, 64, False),
    "321": (256, 321, 12, 64, False),
    "577": (128, 577, 16, 64, False),
}


def ms(f, n=10):
    for _ in range(3):
        f()
    torch.cuda.synchronize()
    a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    a.record()
    for _ in range(n):
        f()
    b.record()
    torch.cuda.synchronize()
    return a.elapsed_time(b) / n


def sdpa(q3, causal, backend):
    q, k, v = (t.transpose(1, 2) for t in q3.unbind(2))
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)


def blocks(own, block, warps, stages):
    def f(q3, causal):
        ba.OWN, ba.BLOCK, ba.WARPS, ba.STAGES = own, block, warps, stages
        return ba.block_attention(q3, causal)[0]

    return f


WAYS = {
    "flash": lambda q, c: sdpa(q, c, SDPBackend.FLASH_ATTENTION),
    "cudnn": lambda q, c: sdpa(q, c, SDPBackend.CUDNN_ATTENTION),
    "efficient": lambda q, c: sdpa(q, c, SDPBackend.EFFICIENT_ATTENTION),
    **{
        f"blocks {b}/{w}/{s}": blocks(b, w, s)
        for b, w, s in ((64, 4, 2), (64, 4, 3), (64, 4, 1), (128, 8, 2), (64, 8, 2), (32, 4, 2))
    },
}
found = []
for name, (n, l, h, w, c) in SHAPES.items():
    g = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(n, l, 3, h, w, device="cuda", generator=g).bfloat16().requires_grad_()
    do = torch.randn(n, l, h, w, device="cuda", generator=g).bfloat16()
    few = x[:4].detach().double().requires_grad_()
    q, k, v = (t.transpose(1, 2) for t in few.unbind(2))
    s = q @ k.transpose(2, 3) * w**-0.5
    if c:
        s = s.masked_fill(torch.ones(l, l, device="cuda", dtype=torch.bool).triu(1), -torch.inf)
    truth = (s.softmax(3) @ v).transpose(1, 2)
    (tg,) = torch.autograd.grad(truth, few, do[:4].double())
    for way, f in WAYS.items():
        r = {"shape": name, "n": n, "length": l, "way": way}
        try:
            o = f(x, c)
            (dx,) = torch.autograd.grad(o, x, do)
            r["error"] = float((o[:4].double() - truth).norm() / truth.norm())
            r["gradient_error"] = float((dx[:4].double() - tg).norm() / tg.norm())
            with torch.no_grad():
                r["forward_ms"] = ms(lambda: f(x, c))

            def both():
                torch.autograd.grad(f(x, c), x, do)

            r["both_ms"] = ms(both)
        except Exception as e:
            r["failed"] = repr(e)[:200]
        found.append(r)
        print(r, flush=True)
json.dump(found, open(sys.argv[1], "w"), indent=1)
