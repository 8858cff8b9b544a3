"""What the host does in a step of MiniLM's size, whose backward pass waits for it.

    python experiments/host.py                      # with kernels of short texts
    python experiments/without_short.py experiments/host.py

Seconds of a step of 32,768 pairs, of which 8 micro-batches are kept, and the longest functions.
"""

import argparse
import cProfile
import pstats
import time

import torch
from machinery.parts import Parts

import step_time

options = argparse.Namespace(device="cuda", micro_batches=8, micro_batch_size=None)
trainer, whole = step_time.prepared("minilm", 4096, options)
trainer.division.kept = 8
seconds = []
for _ in range(8):
    began = time.perf_counter()
    trainer.train_step(whole)
    torch.cuda.synchronize()
    seconds.append(time.perf_counter() - began)
print("seconds", [round(s, 3) for s in seconds], flush=True)
with Parts(trainer) as parts:
    trainer.train_step(whole)
print({name: round(s, 3) for name, s in parts.seconds().items()}, flush=True)
profile = cProfile.Profile()
profile.enable()
for _ in range(3):
    trainer.train_step(whole)
profile.disable()
for order in ("tottime", "cumtime"):
    pstats.Stats(profile).sort_stats(order).print_stats(45)
