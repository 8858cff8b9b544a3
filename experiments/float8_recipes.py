"""On a GPU: ms of forward and of forward + backward of a compiled MLP (w -> 4w -> w) in bf16 and by each
recipe of torchao, and whether a ViT's features are equal with and without gradients."""

import torch
from torch import nn

from megabatch.models import float8
from megabatch.models.blocks import compile_blocks


class Block(nn.Module):
    def __init__(self, w):
        super().__init__()
        self.norm, self.mlp = (
            nn.LayerNorm(w),
            nn.Sequential(nn.Linear(w, 4 * w), nn.GELU(), nn.Linear(4 * w, w)),
        )

    def forward(self, x):
        return x + self.mlp(self.norm(x))


def model(w):
    torch.manual_seed(0)
    m = nn.Module()
    m.visual = nn.Sequential(*(Block(w) for _ in range(4)))
    return m.cuda()


def timed(f, n=10):
    for _ in range(3):
        f()
    a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    a.record()
    [f() for _ in range(n)]
    b.record()
    torch.cuda.synchronize()
    return a.elapsed_time(b) / n / 4


print(torch.__version__, torch.cuda.get_device_name())
for name, w, tokens in (
    ("text B", 512, 40960),
    ("B", 768, 102400),
    ("L", 1024, 131584),
    ("H", 1280, 131584),
    ("bigG", 1664, 65792),
):
    for recipe in ("bf16", "rowwise_with_gw_hp", "rowwise", "tensorwise"):
        torch._dynamo.reset()
        float8.RECIPE = recipe
        m = model(w)
        if recipe != "bf16":
            float8.use_float8(m)
        compile_blocks(m)
        x = torch.randn(tokens // 64, 64, w, device="cuda", requires_grad=True)

        def forward():
            with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
                return m.visual(x)

        def both():
            with torch.autocast("cuda", torch.bfloat16):
                y = m.visual(x)
            y.backward(x.detach())
            return y

        try:
            y = both()
            same = torch.equal(forward(), y.detach())
            torch.cuda.reset_peak_memory_stats()
            both()
            peak = torch.cuda.max_memory_allocated() / 2**30
            print(
                f"{name} {w} {recipe}: forward {timed(forward):.3f} ms, both {timed(both):.3f} ms a block, {peak:.1f} GiB, passes equal {same}",
                flush=True,
            )
        except Exception as error:
            print(name, recipe, type(error).__name__, str(error)[:300], flush=True)
        del m, x
        torch.cuda.empty_cache()
