"""The speeds of the GPU at hand, from a short measurement (`megabatch plan --probe`)."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from megabatch.models.blocks import compile_blocks
from megabatch.planning.plan import Planner
from megabatch.planning.seconds import work_seconds
from megabatch.planning.speeds import Speeds
from megabatch.planning.towers import AUTOCAST

#: Pairs of the micro-batch that is measured, at most.
PAIRS = 512


def probe(
    planner: Planner,
    device: torch.device,
    *,
    seconds: float = 2.0,
    side: int = 8192,
    nbytes: int = 1 << 30,
) -> Speeds:
    """The device's rates, and the share of them that the towers' products reach.

    Args:
        planner: of the model, a copy of which is moved to the device.
        device: to measure.
        seconds: for which each measurement is repeated, at least: a GPU that was idle is faster
            until it is at its power limit.
        side: of the square matrices that are multiplied.
        nbytes: that are copied within the device's memory.
    """
    config, module = planner.config, copy.deepcopy(planner.towers.module).to(device)
    dtype = AUTOCAST.get(config.precision, torch.float32)
    x = torch.randn(side, side, device=device, dtype=dtype)
    source, target = torch.empty(2, nbytes, dtype=torch.uint8, device=device)
    speeds = replace(
        planner.speeds or Speeds(),
        products=2 * side**3 / _time(lambda: x @ x, seconds),
        memory=2 * nbytes / _time(lambda: target.copy_(source), seconds),
    )
    size = min(PAIRS, planner.usual)
    micro = planner.encoders.count(size, {})
    if planner.compiled:
        compile_blocks(module)
    inputs = [tensor.fill_(1) for tensor in planner.sample.empty(size, device)]

    def both_passes() -> None:
        module.zero_grad()
        with torch.autocast(device.type, dtype, enabled=config.precision in AUTOCAST):
            outputs = [output for output in module(*inputs).values() if _trained(output)]
        torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])

    taken = _time(both_passes, seconds)
    # All other time is taken to be as on an H200.
    work = micro.record.plus(micro.backward)
    rest = work_seconds(replace(work, flops=0), speeds, compiled=planner.compiled)
    share = work.flops / speeds.products / max(taken - rest, taken / 10)
    return replace(speeds, encoders=min(1.0, share))


def _trained(output: Tensor | None) -> bool:
    return output is not None and output.requires_grad


def _time(call: Callable[[], object], seconds: float) -> float:
    """Seconds of a call, after two to warm up."""

    def run() -> None:
        call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    run()
    run()
    begun, count = time.perf_counter(), 0
    while (passed := time.perf_counter() - begun) < seconds or not count:
        run()
        count += 1
    return passed / count
