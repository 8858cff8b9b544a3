"""Where the start of a run goes: seconds of each trial and step, and of compilation in it.

PYTHONPATH=src:benchmarks python experiments/start.py --model ViT-L-14 --size 4096 --steps 3
"""

from __future__ import annotations

import argparse
import time

import torch
from torch._dynamo.utils import compile_times

from machinery.steps import Megabatch, make_pairs
from megabatch.data import Batch
from megabatch.training import micro_batch
from megabatch.training.world import World

began = time.perf_counter()


def told(what, function):
    def call(*args, **kwargs):
        start = time.perf_counter()
        result = function(*args, **kwargs)
        torch.cuda.synchronize()
        now = time.perf_counter()
        size = next((a for a in args if isinstance(a, int)), "")
        print(f"{now - began:7.1f} s  {what} {size}: {now - start:.1f} s", flush=True)
        return result

    return call


parser = argparse.ArgumentParser()
parser.add_argument("--model", default="ViT-L-14")
parser.add_argument("--size", type=int, default=4096)
parser.add_argument("--steps", type=int, default=3)
o = parser.parse_args()
torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
micro_batch.Trials.__call__ = told("trial", micro_batch.Trials.__call__)
contender = Megabatch(o.model, o.size, World(torch.device("cuda")), {"torchcompile": True})
pairs = make_pairs(
    contender.towers,
    o.size,
    World(torch.device("cuda")),
)
batch = Batch(pairs.bytes(), pairs.tokens, torch.arange(o.size))
step = told("step", contender.trainer.train_step)
for _ in range(o.steps):
    step(batch)
print(contender.news, contender.trainer.division.rows, contender.trainer.division.kept)
print(compile_times(repr="str", aggregate=True)[-3000:])
