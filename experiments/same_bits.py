"""Hashes of values and gradients: run once with SRC=<before>/src, once with SRC=src, and compare (diff)."""

import hashlib
import os
import sys

sys.path.insert(0, os.environ.get("SRC", "src"))
import torch

import megabatch as mb


def digest(*tensors):
    h = hashlib.sha256()
    for t in tensors:
        h.update(t.detach().contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return h.hexdigest()[:16]


for b in (1000, 1024, 3001, 8192, 16384):
    g = torch.Generator("cuda").manual_seed(b)
    x, y = (
        torch.nn.functional.normalize(torch.randn(b, 768, device="cuda", generator=g), dim=1)
        .bfloat16()
        .requires_grad_()
        for _ in range(2)
    )
    s = torch.tensor(14.3, device="cuda", requires_grad=True)
    ids = torch.arange(b, device="cuda") // 2
    w = torch.rand(b, device="cuda", generator=g)
    for name, f in {
        "clip": lambda: mb.ClipLoss()(x, y, s),
        "clip, ids": lambda: mb.ClipLoss()(x, y, s, ids=ids),
        "clip, weights": lambda: mb.ClipLoss()(x, y, s, weights=w),
        "smoothed": lambda: mb.ClipLoss(label_smoothing=0.1)(x, y, s),
        "scaled": lambda: 3.3 * mb.ClipLoss()(x, y, s),
        "siglip": lambda: mb.SigLipLoss()(x, y, s, -s),
        "ntxent": lambda: s * 0 + mb.NTXentLoss(0.1, normalize=False)(x, y),
        "distill": lambda: sum(mb.DistillClipLoss()(x, y, s, x, y, s)),
    }.items():
        for _ in range(3):  # through Triton, then directly
            loss = f()
            found = digest(loss, *torch.autograd.grad(loss, (x, y, s)))
        print(b, name, found, flush=True)
q, c = (
    torch.nn.functional.normalize(torch.randn(128, l, 128, device="cuda", generator=g), dim=-1)
    .bfloat16()
    .requires_grad_()
    for l in (32, 180)
)
for _ in range(3):
    loss = mb.MaxSimLoss(0.05)(q, c)
    found = digest(loss, *torch.autograd.grad(loss, (q, c)))
print("maxsim", found)
