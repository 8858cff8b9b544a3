"""Variants of the towers' passes, each alone, on one GPU: what is worth building into the trainer.

    PYTHONPATH=src:benchmarks python .sim/experiments.py --output OUT.json [--budget 230]

Groups, in the order of their importance (--groups picks):
  products    products of the blocks' shapes, forward and both gradients: the bound by cuBLAS
  attention   attention alone by backend, fp and fp+bp, from packed q, k, v
  casts       copies of all weights to bf16, sums of gradients
  towers      passes of whole towers, compiled in blocks: today's and variants
Share: operations of today's full tower over the time, against 660 TFLOP/s.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import json
import math
import os
import time
import traceback
import types
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

RATE = 660e12
INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
#: width, layers, heads, tokens, patch, rows of a micro-batch
IMAGES = {
    "ViT-L-14": (1024, 24, 16, 257, 14, 512),
    "ViT-B-16": (768, 12, 12, 197, 16, 512),
    "ViT-B-32": (768, 12, 12, 50, 32, 2048),
}
TEXT_ROWS = 2048  # pairs of a text micro-batch

# --- attention of short sequences: a whole sequence of a head in one program ----------------------

if triton is not None:

    @triton.jit
    def _scores(
        qkv, cu, scale, heads: tl.constexpr, CAUSAL: tl.constexpr, L: tl.constexpr, D: tl.constexpr
    ):
        n, h = tl.program_id(0), tl.program_id(1)
        start = tl.load(cu + n)
        length = tl.load(cu + n + 1) - start
        rows, cols = tl.arange(0, L), tl.arange(0, D)
        inside = (rows < length)[:, None]
        at = (start + rows).to(tl.int64)[:, None] * (3 * heads * D) + h * D + cols[None, :]
        q = tl.load(qkv + at, inside, 0.0)
        k = tl.load(qkv + at + heads * D, inside, 0.0)
        v = tl.load(qkv + at + 2 * heads * D, inside, 0.0)
        s = tl.dot(q, tl.trans(k)) * (scale * 1.4426950408889634)
        seen = (rows < length)[None, :]
        if CAUSAL:
            seen = seen & (rows[None, :] <= rows[:, None])
        s = tl.where(seen, s, float("-inf"))
        p = tl.exp2(s - tl.max(s, 1)[:, None])
        p = p / tl.sum(p, 1)[:, None]
        out_at = (start + rows).to(tl.int64)[:, None] * (heads * D) + h * D + cols[None, :]
        return q, k, v, p, at, out_at, inside

    @triton.jit
    def _short_forward(
        qkv,
        out,
        cu,
        scale,
        heads: tl.constexpr,
        CAUSAL: tl.constexpr,
        L: tl.constexpr,
        D: tl.constexpr,
    ):
        q, k, v, p, at, out_at, inside = _scores(qkv, cu, scale, heads, CAUSAL, L, D)
        o = tl.dot(p.to(v.dtype), v)
        tl.store(out + out_at, o.to(v.dtype), inside)

    @triton.jit
    def _short_backward(
        qkv,
        dout,
        dqkv,
        cu,
        scale,
        heads: tl.constexpr,
        CAUSAL: tl.constexpr,
        L: tl.constexpr,
        D: tl.constexpr,
    ):
        q, k, v, p, at, out_at, inside = _scores(qkv, cu, scale, heads, CAUSAL, L, D)
        do = tl.load(dout + out_at, inside, 0.0)
        dv = tl.dot(tl.trans(p.to(v.dtype)), do)
        dp = tl.dot(do, tl.trans(v))
        ds = (p * (dp - tl.sum(p * dp, 1)[:, None]) * scale).to(v.dtype)
        dq = tl.dot(ds, k)
        dk = tl.dot(tl.trans(ds), q)
        tl.store(dqkv + at, dq.to(v.dtype), inside)
        tl.store(dqkv + at + heads * D, dk.to(v.dtype), inside)
        tl.store(dqkv + at + 2 * heads * D, dv.to(v.dtype), inside)


def _launch(kernel, tensors, cu, heads, width, block, causal):
    grid = (cu.numel() - 1, heads)
    kernel[grid](
        *tensors,
        cu,
        width**-0.5,
        heads,
        causal,
        block,
        width,
        num_warps={16: 1, 32: 2, 64: 4}.get(block, 8),
    )


def _slow_backward(qkv, dout, cu, causal):
    """The same on the CPU, for the test."""
    parts = []
    for i in range(len(cu) - 1):
        rows = slice(int(cu[i]), int(cu[i + 1]))
        q, k, v = (t.transpose(0, 1).float() for t in qkv[rows].unbind(1))
        do, scale = dout[rows].transpose(0, 1).float(), q.shape[-1] ** -0.5
        s = q @ k.mT * scale
        if causal:
            s = s.masked_fill(torch.ones(s.shape[-2:]).triu(1).bool(), -math.inf)
        p = s.softmax(-1)
        dp = do @ v.mT
        ds = p * (dp - (p * dp).sum(-1, keepdim=True)) * scale
        parts.append(torch.stack([ds @ k, ds.mT @ q, p.mT @ do]).permute(2, 0, 1, 3))
    return torch.cat(parts).to(qkv.dtype)


@torch.library.custom_op("mbx::short", mutates_args=())
def short(qkv: torch.Tensor, cu: torch.Tensor, block: int, causal: bool) -> torch.Tensor:
    """Attention (t, heads, d) of packed sequences, qkv (t, 3, heads, d) contiguous."""
    t, _, heads, width = qkv.shape
    if not (qkv.is_cuda or INTERPRET):
        return varlen(*qkv.unbind(1), cu, cu, 0, 0, causal)
    out = qkv.new_empty(t, heads, width)
    _launch(_short_forward, (qkv, out), cu, heads, width, block, causal)
    return out


@torch.library.custom_op("mbx::short_backward", mutates_args=())
def short_backward(
    qkv: torch.Tensor, dout: torch.Tensor, cu: torch.Tensor, block: int, causal: bool
) -> torch.Tensor:
    if not (qkv.is_cuda or INTERPRET):
        return _slow_backward(qkv, dout, cu, causal)
    dqkv = torch.empty_like(qkv)
    _, _, heads, width = qkv.shape
    _launch(_short_backward, (qkv, dout.contiguous(), dqkv), cu, heads, width, block, causal)
    return dqkv


short.register_fake(lambda qkv, cu, block, causal: qkv.new_empty(qkv.shape[0], *qkv.shape[2:]))
short_backward.register_fake(lambda qkv, dout, cu, block, causal: torch.empty_like(qkv))


def _setup(ctx, inputs, output):
    qkv, cu, ctx.block, ctx.causal = inputs
    ctx.save_for_backward(qkv, cu)


def _short_grad(ctx, dout):
    qkv, cu = ctx.saved_tensors
    return short_backward(qkv, dout, cu, ctx.block, ctx.causal), None, None, None


short.register_autograd(_short_grad, setup_context=_setup)


def block_of(longest: int) -> int:
    return max(16, 1 << (longest - 1).bit_length())


def varlen(q, k, v, cu_q, cu_k, most_q, most_k, causal):
    """torch's attention of packed sequences (flash); on the CPU a loop, for the test."""
    if q.is_cuda:
        from torch.nn.attention.varlen import varlen_attn

        return varlen_attn(
            q, k, v, cu_q, cu_k, most_q, most_k, window_size=(-1, 0 if causal else -1)
        )
    parts = []
    for i in range(len(cu_q) - 1):
        a, b = (slice(int(c[i]), int(c[i + 1])) for c in (cu_q, cu_k))
        one = (t.transpose(0, 1)[None] for t in (q[a], k[b], v[b]))
        parts.append(F.scaled_dot_product_attention(*one, is_causal=causal)[0].transpose(0, 1))
    return torch.cat(parts)


# --- blocks ---------------------------------------------------------------------------------------


def mlp(block, x):
    return x + block.ls_2(block.mlp(block.ln_2(x)))


def lean(self, x, k_x=None, v_x=None, attn_mask=None, *, cu=None, block=0, low=False):
    """open_clip's block with q, k and v as views of one product; `cu`: attention by `short`."""
    if low:
        x = x.to(torch.bfloat16)
    n, length, width = x.shape
    attn, causal = self.attn, attn_mask is not None
    heads = attn.num_heads
    qkv = F.linear(self.ln_1(x), attn.in_proj_weight, attn.in_proj_bias)
    if cu is not None:
        o = short(qkv.view(n * length, 3, heads, width // heads), cu, block, causal)
        o = o.view(n, length, width)
    else:
        q, k, v = qkv.view(n, length, 3, heads, width // heads).permute(2, 0, 3, 1, 4).unbind(0)
        o = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        o = o.transpose(1, 2).reshape(n, length, width)
    return mlp(self, x + self.ls_1(attn.out_proj(o)))


def lean_pooled(self, x, k_x=None, v_x=None, attn_mask=None):
    """The last block for the first token alone, x (n, 1, width)."""
    n, length, width = x.shape
    attn = self.attn
    heads = attn.num_heads
    h = self.ln_1(x)
    w, b = attn.in_proj_weight, attn.in_proj_bias
    q = F.linear(h[:, :1], w[:width], b[:width]).view(n, 1, heads, -1).transpose(1, 2)
    kv = F.linear(h, w[width:], b[width:]).view(n, length, 2, heads, width // heads)
    k, v = kv.permute(2, 0, 3, 1, 4).unbind(0)
    o = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(n, 1, width)
    return mlp(self, x[:, :1] + self.ls_1(attn.out_proj(o)))


def packed_block(self, x, cu, most: int, how: str):
    """A block on packed tokens, x (t, width)."""
    width = x.shape[-1]
    attn = self.attn
    heads = attn.num_heads
    qkv = F.linear(self.ln_1(x), attn.in_proj_weight, attn.in_proj_bias)
    qkv = qkv.view(-1, 3, heads, width // heads)
    if how == "short":
        o = short(qkv, cu, most, True)
    else:
        o = varlen(*qkv.unbind(1), cu, cu, most, most, True)
    return mlp(self, x + self.ls_1(attn.out_proj(o.reshape(-1, width))))


def packed_last(self, x, cu, most: int, ends, ones):
    """The last block for the last token of each text, (n, width)."""
    width = x.shape[-1]
    attn = self.attn
    heads = attn.num_heads
    h = self.ln_1(x)
    w, b = attn.in_proj_weight, attn.in_proj_bias
    q = F.linear(h[ends], w[:width], b[:width]).view(-1, heads, width // heads)
    k, v = F.linear(h, w[width:], b[width:]).view(-1, 2, heads, width // heads).unbind(1)
    o = varlen(q, k, v, ones, cu, 1, most, False)
    return mlp(self, x[ends] + self.ls_1(attn.out_proj(o.reshape(-1, width))))


class PackedText(nn.Module):
    """A CLIP text tower on packed tokens; `pooled`: the last block for the last tokens alone."""

    def __init__(self, clip, how, pooled, low, backend):
        super().__init__()
        self.clip, self.low, self.pooled, self.how = clip, low, pooled, how
        self.run = torch.compile(
            functools.partial(packed_block, how=how), dynamic=True, backend=backend
        )
        self.last = torch.compile(packed_last, dynamic=True, backend=backend)

    def forward(self, given):
        ids, places, cu, most, ends, ones = given
        clip = self.clip
        x = F.embedding(ids, clip.token_embedding.weight)
        x = x + F.embedding(places, clip.positional_embedding)
        if self.low:
            x = x.to(torch.bfloat16)
        *blocks, last = clip.transformer.resblocks
        size = block_of(most) if self.how == "short" else most
        for block in blocks:
            x = self.run(block, x, cu, size)
        if self.pooled:
            x = self.last(last, x, cu, most, ends, ones)
        else:
            x = self.run(last, x, cu, size)[ends]
        x = clip.ln_final(x) @ clip.text_projection
        return F.normalize(x, dim=-1)


def pack(tokens):
    """Packed tokens of padded ones, without their padding."""
    n = len(tokens)
    lengths = tokens.argmax(1) + 1
    inside = torch.arange(tokens.shape[1], device=tokens.device)[None] < lengths[:, None]
    cu = F.pad(lengths.cumsum(0), (1, 0)).int()
    places = inside.nonzero()[:, 1]
    ones = torch.arange(n + 1, device=tokens.device, dtype=torch.int32)
    return tokens[inside], places, cu, int(lengths.max()), cu[1:].long() - 1, ones


# --- measuring ------------------------------------------------------------------------------------


class Bench:
    def __init__(self, options):
        self.o = options
        self.cuda = options.device == "cuda"
        self.began = time.perf_counter()
        self.records = []
        self.references = {}
        self.towers = {}

    def left(self):
        return self.o.budget - (time.perf_counter() - self.began)

    def sync(self):
        if self.cuda:
            torch.cuda.synchronize()

    def ms(self, call, seconds):
        """Mean milliseconds; the first two calls compile and warm up."""
        call(), call()
        self.sync()
        t = time.perf_counter()
        call()
        self.sync()
        count = max(2, min(500, math.ceil(seconds / (time.perf_counter() - t))))
        if not self.cuda:
            count = 1
        t = time.perf_counter()
        for _ in range(count):
            call()
        self.sync()
        return 1e3 * (time.perf_counter() - t) / count

    def add(self, **record):
        record["at"] = round(time.perf_counter() - self.began, 1)
        self.records.append(record)
        shown = (f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in record.items())
        print("  ".join(shown), flush=True)
        if self.o.output:
            self.o.output.parent.mkdir(parents=True, exist_ok=True)
            self.o.output.write_text(json.dumps(self.records, indent=1))

    @contextlib.contextmanager
    def tried(self, **what):
        try:
            yield
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            text = f"{type(error).__name__}: {str(error)[:300]} ({last.filename}:{last.lineno})"
            self.add(**what, error=text)
        finally:
            gc.collect()
            if self.cuda:
                torch.cuda.empty_cache()


def autocast(device):
    return torch.autocast(device, torch.bfloat16, cache_enabled=False)


def products(bench):
    """Products of the blocks, as cuBLAS runs them for F.linear and its gradients."""
    o, d = bench.o, bench.o.device
    n = 8192 if bench.cuda else 64
    a = torch.randn(n, n, device=d).bfloat16()
    ms = bench.ms(lambda: a @ a, 1.0)
    bench.add(group="products", name=f"{n} square", tflops=2e-9 * n**3 / ms)
    shapes = {m: (rows * t, w) for m, (w, _, _, t, _, rows) in o.images.items() if m in o.models}
    shapes["text of B"] = (o.text_rows * 20, o.text_width)
    for model, (t, w) in shapes.items():
        total, work = 0.0, 0.0
        for k, m in ((w, 3 * w), (w, w), (w, 4 * w), (4 * w, w)):
            with bench.tried(group="products", name=model, shape=f"{t}x{k}x{m}"):
                x, g = (torch.randn(t, c, device=d).bfloat16() for c in (k, m))
                weight, b = (
                    torch.randn(m, k, device=d).bfloat16(),
                    torch.randn(m, device=d).bfloat16(),
                )
                with torch.no_grad():
                    calls = {
                        "forward": lambda: F.linear(x, weight, b),
                        "dx": lambda: g @ weight,
                        "dw": lambda: g.T @ x,
                        "bias sum": lambda: g.sum(0),
                    }
                    took = {c: bench.ms(call, o.short) for c, call in calls.items()}
                total += sum(took[c] for c in ("forward", "dx", "dw"))
                work += 6 * t * k * m
                rates = {c: 2e-9 * t * k * m / s for c, s in took.items() if c != "bias sum"}
                bench.add(
                    group="products",
                    name=model,
                    shape=f"{t}x{k}x{m}",
                    **rates,
                    bias_sum_ms=took["bias sum"],
                )
        if total:
            bench.add(
                group="products",
                name=f"{model}, all",
                ms_a_layer=total,
                share=work / total / 1e-3 / RATE,
            )


def attention(bench):
    """Attention alone, from packed q, k and v (as lean blocks have them), by backend."""
    o, d = bench.o, bench.o.device
    cases = {
        m: (rows, h, t, w // h, False)
        for m, (w, _, h, t, _, rows) in o.images.items()
        if m in o.models
    }
    heads = o.text_width // 64 if bench.cuda else 2
    cases |= {
        f"texts of {t}": (40960 // t if bench.cuda else 4, heads, t, 64 if bench.cuda else 16, True)
        for t in o.lengths
    }
    for name, (n, h, t, w, causal) in cases.items():
        qkv = torch.randn(n, t, 3, h, w, device=d).bfloat16().requires_grad_()
        cu = torch.arange(n + 1, device=d, dtype=torch.int32) * t
        mask = torch.full((t, t), float("-inf"), device=d).triu_(1).bfloat16() if causal else None
        g = torch.randn(n, t, h * w, device=d).bfloat16()
        reference = None
        work = 4 * n * h * t * t * w

        def sdpa(masked, copies=False, qkv=qkv, n=n, t=t, causal=causal, mask=mask):
            q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
            if copies:
                q, k, v = (part.contiguous() for part in (q, k, v))
            made = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask if masked else None, is_causal=causal and not masked
            )
            return made.transpose(1, 2).reshape(n, t, -1)

        ways = {}
        for backend in BACKENDS:
            if backend == "math" and t > 80:
                continue
            ways[backend] = (backend, lambda: sdpa(False))
            if causal and backend != "flash":
                ways[f"{backend}, mask"] = (backend, lambda: sdpa(True))
        ways["varlen"] = (
            None,
            lambda: varlen(*qkv.view(n * t, 3, h, w).unbind(1), cu, cu, t, t, causal).reshape(
                n, t, -1
            ),
        )
        if t <= 128 and (bench.cuda or INTERPRET):
            ways["short"] = (
                None,
                lambda: short(qkv.view(n * t, 3, h, w), cu, block_of(t), causal).view(n, t, -1),
            )
        for way, (backend, call) in ways.items():
            context = sdpa_kernel(BACKENDS[backend]) if backend else contextlib.nullcontext()
            with bench.tried(group="attention", name=name, way=way), context:
                with torch.no_grad():
                    first = bench.ms(call, o.short)
                both = bench.ms(lambda: torch.autograd.grad(call(), qkv, g), o.short)
                out = call()
                (grad,) = torch.autograd.grad(out, qkv, g)
                both_found = out.detach().float(), grad.float()
                if reference is None:
                    reference = both_found
                off = [float((a - b).norm() / b.norm()) for a, b in zip(both_found, reference)]
                bench.add(
                    group="attention",
                    name=name,
                    way=way,
                    forward_ms=first,
                    both_ms=both,
                    forward_tflops=work / first / 1e9,
                    off=max(off),
                )
                del out, grad, both_found
        del qkv, g, reference


def casts(bench):
    """What copies of weights and sums of gradients cost for each micro-batch."""
    for model, millions in (("ViT-L-14", 428), ("ViT-B-32", 151)):
        if model not in bench.o.models:
            continue
        n = millions * 10**6 if bench.cuda else 1000
        with bench.tried(group="casts", name=model):
            a = torch.zeros(n, device=bench.o.device)
            b, c = a.bfloat16(), a.clone()
            bench.add(
                group="casts",
                name=model,
                cast_ms=bench.ms(lambda: b.copy_(a), bench.o.short),
                sum_ms=bench.ms(lambda: c.add_(a), bench.o.short),
            )
            del a, b, c


# --- towers ---------------------------------------------------------------------------------------


def image_operations(w, layers, heads, t, patch, rows):
    return rows * (layers * (24 * t * w * w + 4 * t * t * w) + 2 * (t - 1) * 3 * patch**2 * w)


def text_operations(tokens, w, layers, lengths):
    return layers * (24 * tokens * w * w + 4 * w * float((lengths.double() ** 2).sum()))


class Tower:
    """A tower of a model, whose blocks get their forward pass anew for each variant."""

    def __init__(self, bench, model, tower):
        from megabatch.models import create

        self.bench = bench
        torch.manual_seed(0)
        try:
            with torch.device(bench.o.device):  # random numbers take long on the CPU
                module = create(model).module
        except Exception:
            module = create(model).module
        self.side = module.visual.image_size
        self.side = self.side if isinstance(self.side, int) else self.side[0]
        self.tower = tower
        self.module = module
        if tower == "image":
            self.blocks = list(module.visual.transformer.resblocks)
        else:
            self.blocks = list(module.transformer.resblocks)
        module.to(bench.o.device)
        used = module.visual if tower == "image" else None
        hidden = set(map(id, module.visual.parameters())) if tower == "text" else set()
        self.parameters = [p for p in (used or module).parameters() if id(p) not in hidden]
        self.parameters = [p for p in self.parameters if p.ndim > 0]
        # Their own forward passes, which compile_blocks replaces in place.
        self.own = {m: dict(vars(m)) for m in module.modules()}

    def reset(self):
        for m, before in self.own.items():
            for name in set(vars(m)) - set(before):
                delattr(m, name)
        torch._dynamo.reset()

    def compiled(self, forwards, dynamic):
        """Set the blocks' forward passes and compile; `forwards`: function for each block."""
        from megabatch.models.blocks import compile_blocks

        self.reset()
        for block, forward in zip(self.blocks, forwards):
            if forward is not None:
                block.forward = types.MethodType(forward, block)
        compile_blocks(self.module, {"text"} if dynamic else (), backend=self.bench.o.backend)

    def encode(self, given):
        if self.tower == "image":
            return self.module.encode_image(given, normalize=True)
        return self.module.encode_text(given, normalize=True)

    def measure(
        self,
        name,
        given,
        rows,
        operations,
        call=None,
        reference=None,
        graphs=False,
        inference=False,
        **more,
    ):
        """Record both passes of a micro-batch; returns its features, to compare others with."""
        bench, d = self.bench, self.bench.o.device
        call = call or self.encode
        what = {"group": "towers", "name": name, "rows": rows, **more}
        began = time.perf_counter()
        record = dict(what)
        with autocast(d):
            try:
                with torch.inference_mode() if inference else torch.no_grad():
                    first = bench.ms(lambda: call(given), bench.o.long)
                    features = call(given).float().clone()
                record |= {"first_ms": first, "first_share": operations / first / 1e-3 / RATE}
                if reference is not None and len(reference) == len(features):
                    record["off"] = float((features - reference).norm() / reference.norm())
                if not inference:
                    both, found = self.second(call, given, features)
                    second = bench.ms(both, 2 * bench.o.long)
                    share = 3 * operations / second / 1e-3 / RATE
                    record |= {
                        "second_ms": second,
                        "second_share": share,
                        "pairs_s": rows / (first + second) * 1e3,
                        **found,
                    }
            except Exception as error:
                record["error"] = f"{type(error).__name__}: {str(error)[:300]}"
                features = None
            bench.add(**record, took=time.perf_counter() - began)
            if graphs and "error" not in record:
                with bench.tried(**what, as_graph=True):
                    with torch.no_grad():
                        first = self.captured(lambda: call(given))
                    bench.add(**what, as_graph=True, first_ms=first)
                    bench.add(**what, as_graph=True, second_ms=self.captured(both))
        return features

    def second(self, call, given, features):
        """A function that makes the second pass, and what one of them shows."""
        cuda, parameters = self.bench.cuda, self.parameters
        generator = torch.Generator(features.device).manual_seed(1)
        up = torch.randn(features.shape, generator=generator, device=features.device)

        def both():
            made = call(given)
            return torch.autograd.grad(made, parameters, up.to(made.dtype), allow_unused=True)

        both()
        before = torch.cuda.memory_allocated() if cuda else 0
        made = call(given)
        graph = (torch.cuda.memory_allocated() if cuda else 0) - before
        del made
        grads = both()
        norm = math.sqrt(sum(float(g.float().norm()) ** 2 for g in grads if g is not None))
        return both, {"graph_gb": graph / 1e9, "gradient_norm": norm / math.sqrt(len(features))}

    def captured(self, call):
        """Milliseconds of a call as a CUDA graph: without launches."""
        if not self.bench.cuda:
            return 0.0
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            call()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            kept = call()
        took = self.bench.ms(graph.replay, self.bench.o.long)
        del kept, graph
        return took


def tower_of(bench, model, tower):
    """A model's tower, made once; that of another model is freed before."""
    key = model, tower
    if key not in bench.towers:
        bench.towers.clear()
        gc.collect()
        bench.towers[key] = Tower(bench, bench.o.real.get(model, model), tower)
    return bench.towers[key]


def images(bench, model, names):
    o = bench.o
    shape = o.images[model]
    w, layers, heads, t, patch, rows = shape
    tower = tower_of(bench, model, "image")
    pixels = torch.randint(
        256, (rows, 3, tower.side, tower.side), dtype=torch.uint8, device=o.device
    )
    work = image_operations(*shape)
    cu = torch.arange(rows + 1, device=o.device, dtype=torch.int32) * t
    short_lean = functools.partial(lean, cu=cu, block=block_of(t))
    short_lean = _as_function(short_lean)
    variants = {
        "today": [None] * layers,
        "lean": [lean] * layers,
        "lean pooled": [lean] * (layers - 1) + [lean_pooled],
        "short pooled": [short_lean] * (layers - 1) + [lean_pooled],
    }
    for name in names:
        if bench.left() < o.reserve:
            bench.add(group="towers", name=f"{model} images, {name}", error="no time left")
            continue
        base, *options = name.split("+")
        context = contextlib.ExitStack()
        with bench.tried(group="towers", name=f"{model} images, {name}"), context:
            for option in options:
                if option in BACKENDS:  # preferred
                    order = [BACKENDS[option], *BACKENDS.values()]
                    context.enter_context(
                        sdpa_kernel(list(dict.fromkeys(order)), set_priority=True)
                    )
                if option.startswith("keep"):
                    config = torch._functorch.config
                    context.enter_context(
                        config.patch(activation_memory_budget=float(option.removeprefix("keep")))
                    )
            some = pixels[: int(next((x[4:] for x in options if x.startswith("rows")), rows))]
            tower.compiled(variants[base], dynamic=False)
            found = tower.measure(
                f"{model} images, {name}",
                some,
                len(some),
                work * len(some) / rows,
                reference=bench.references.get(model),
                graphs="graph" in options,
                inference="inference" in options,
            )
            if name.startswith("today") and len(some) == rows and found is not None:
                bench.references.setdefault(model, found)


def _as_function(partial):
    """A function of a partial with `self` first, for MethodType."""

    def forward(self, x, k_x=None, v_x=None, attn_mask=None):
        return partial.func(self, x, k_x, v_x, attn_mask, **partial.keywords)

    return forward


def texts(bench, model, names):
    """The text tower, on the middle micro-batch of 32,768 sorted definitions, and packed."""
    o = bench.o
    tower = tower_of(bench, model, "text")
    clip = tower.module
    if bench.cuda:
        # As cut by the trainer from 32,768 definitions for 2,048 pairs at a time.
        parts = [(1720, 24), (2580, 16)]
    else:
        parts = [(6, 16), (5, 8)]
    batches = [text_batch(clip, *part, o.device) for part in parts]
    for name in names:
        label = f"{model} texts, {name}"
        if bench.left() < o.reserve:
            bench.add(group="towers", name=label, error="no time left")
            continue
        packed = None
        if name.startswith("packed"):
            tower.reset()
            how = "short" if "short" in name else "varlen"
            packed = PackedText(clip, how, "pooled" in name, "low" in name, o.backend)
        elif not name.startswith("lean short"):
            forward = None
            if name.startswith("lean"):
                forward = _as_function(functools.partial(lean, low="low" in name))
            tower.compiled([forward] * len(tower.blocks), dynamic="static" not in name)
        for (rows, columns), (tokens, lengths) in zip(parts, batches):
            with bench.tried(group="towers", name=label, columns=columns):
                if name.startswith("lean short"):  # a graph for each length
                    cu = torch.arange(rows + 1, device=o.device, dtype=torch.int32) * columns
                    keywords = {"low": "low" in name, "cu": cu, "block": block_of(columns)}
                    forward = _as_function(functools.partial(lean, **keywords))
                    tower.compiled([forward] * len(tower.blocks), dynamic=False)
                total, w = int(lengths.sum()), clip.transformer.width
                found = tower.measure(
                    label,
                    pack(tokens) if packed else tokens,
                    rows,
                    text_operations(total, w, len(tower.blocks), lengths),
                    call=packed,
                    reference=bench.references.get((model, columns)),
                    graphs="graph" in name,
                    inference="inference" in name,
                    columns=columns,
                    tokens=total,
                )
                if found is not None:
                    bench.references.setdefault((model, columns), found)


def text_batch(clip, rows, columns, device):
    """Random tokens (rows, columns) of texts as sorting leaves them together, and their lengths."""
    generator = torch.Generator().manual_seed(0)
    eot = clip.token_embedding.num_embeddings - 1
    lengths = torch.randint(columns - 7, columns + 1, (rows,), generator=generator)
    lengths[0] = columns
    tokens = torch.randint(1, eot - 1, (rows, columns), generator=generator)
    place = torch.arange(columns)[None]
    tokens[place >= lengths[:, None]] = 0
    tokens[place == lengths[:, None] - 1] = eot
    return tokens.to(device), lengths


PLAN = [
    ("products", None, None),
    ("attention", None, None),
    ("casts", None, None),
    ("images", "ViT-L-14", ["today", "lean", "lean pooled+cudnn"]),
    (
        "texts",
        "ViT-B-32",
        [
            "today",
            "packed short pooled+graph",
            "packed varlen pooled",
            "lean",
            "packed short pooled low",
            "today static+graph",
            "lean short",
            "packed short",
        ],
    ),
    ("images", "ViT-B-32", ["today", "lean pooled+cudnn", "short pooled+graph"]),
    ("images", "ViT-B-16", ["today", "lean pooled+cudnn", "lean pooled+flash"]),
    (
        "images",
        "ViT-L-14",
        [
            "today+cudnn",
            "lean pooled+cudnn+keep0.5",
            "lean pooled+cudnn+rows256",
            "today+inference",
        ],
    ),
]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path)
    parser.add_argument("--budget", type=float, default=230)
    parser.add_argument("--reserve", type=float, default=12, help="seconds that a variant may take")
    parser.add_argument("--only", type=int, nargs="+", help="lines of the plan, from 0")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--backend", default="aot_eager", help="with --tiny")
    parser.add_argument("--tiny", type=Path, help="open_clip configuration: a test on the CPU")
    o = parser.parse_args()
    backend = o.backend
    o.images, o.real, o.backend = IMAGES, {}, "inductor"
    o.models = [*IMAGES]
    o.text_rows, o.text_width, o.lengths = TEXT_ROWS, 512, (8, 16, 24, 40)
    o.short, o.long = 0.12, 0.8
    if o.tiny:
        import open_clip

        open_clip.add_model_config(o.tiny)
        config = json.loads(o.tiny.read_text())
        v = config["vision_cfg"]
        t = (v["image_size"] // v["patch_size"]) ** 2 + 1
        shape = (v["width"], v["layers"], v["width"] // v["head_width"], t, v["patch_size"], 4)
        o.device, o.backend = "cpu", backend
        o.images = dict.fromkeys(IMAGES, shape)
        o.real = dict.fromkeys(IMAGES, o.tiny.stem)
        o.text_rows, o.text_width, o.lengths, o.reserve = 4, 32, (8, 16), 0
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    bench = Bench(o)
    if bench.cuda and torch.cuda.get_device_properties(0).total_memory < 100e9:  # no H200
        o.images = {m: (*shape[:-1], shape[-1] // 2) for m, shape in IMAGES.items()}
    if bench.cuda:
        print(torch.__version__, torch.cuda.get_device_name(), flush=True)
    for i, (group, model, names) in enumerate(PLAN):
        if o.only and i not in o.only:
            continue
        if bench.left() < o.reserve:
            bench.add(group=group, name=model, error="no time left")
            continue
        with bench.tried(group=group, name=model):
            functions = {"products": products, "attention": attention, "casts": casts}
            if group in functions:
                functions[group](bench)
            else:
                {"images": images, "texts": texts}[group](bench, model, names)
    print(f"{time.perf_counter() - bench.began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
