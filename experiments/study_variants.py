"""Times of a study's step: as it is, with short attention, with whole towers compiled."""

import sys
import time
from pathlib import Path

import torch
from torch import nn

from machinery import icon_towers, study, study_data
from machinery.study import Run, Training, step_time
from megabatch.models.short_attention import short_attention

torch._dynamo.config.recompile_limit = 256
own_forward = icon_towers.Block.forward


def short_forward(self, x):
    qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1))
    x = x + self.proj(short_attention(qkv, False).flatten(2))
    return x + self.mlp(self.norm2(x))


own_compile = nn.Module.compile
data = {
    n: study_data.load(n, Path(f"/tmp/data/{n}.npz"), torch.device("cuda"))
    for n in sys.argv[1].split(",")
}
for name, d in data.items():
    for batch in (1024, 16384):
        for variant in ("own", "short", "tower", "short+tower"):
            torch._dynamo.reset()
            icon_towers.Block.forward = short_forward if "short" in variant else own_forward
            if "tower" in variant:

                def compile_blocks(self, *a, **k):
                    pass

                icon_towers.Block.compile = compile_blocks
                towers = (study_data.IconTower, study_data.CaptionTower, study_data.TextTower)
                init = study.Model.__init__

                def model_init(self, run, pairs):
                    init(self, run, pairs)
                    for t in {self.first, self.second}:
                        own_compile(t, dynamic=False)

                study.Model.__init__ = model_init
            began = time.perf_counter()
            try:
                r = (
                    step_time(
                        Run(name, "clip", batch, batch, 33554432 // batch, 1e-3, 0.1, 0),
                        d.train,
                        1.0,
                    )
                    if False
                    else step_time(
                        Run(name, "clip", batch, batch, 33554432 // batch, 1e-3, 0.1, 0), d, 1.0
                    )
                )
                print(
                    name,
                    batch,
                    variant,
                    r["ms"],
                    "took",
                    round(time.perf_counter() - began, 1),
                    r["peak_bytes"] / 1e9,
                    flush=True,
                )
            except Exception as e:
                print(name, batch, variant, "error", repr(e)[:300], flush=True)
            if "tower" in variant:
                del icon_towers.Block.compile
                study.Model.__init__ = init
    # a profile of the largest
    t = Training(Run(name, "clip", 16384, 16384, 2048, 1e-3, 0.1, 0), d.train)
    t.advance(6)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as p:
        t.advance(3)
        torch.cuda.synchronize()
    print(
        p.key_averages().table(
            sort_by="self_device_time_total", row_limit=40, max_name_column_width=100
        )
    )
