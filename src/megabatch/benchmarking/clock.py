"""Timing of repeated calls, and the rate of matrix products as a yardstick."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable

import torch


def times(call: Callable[[], object], device: str, seconds: float, repetitions: int) -> list[float]:
    """Milliseconds of each call, repeated for about `seconds` and at least `repetitions` times.

    A first call warms up and determines how many calls fill the time.
    """
    once = timed_calls([call], device)[0]
    taken: list[float] = []
    # In a few series, as the first calls of an idle GPU are slower and would suggest too few.
    while len(taken) < repetitions or sum(taken) < 1e3 * seconds:
        count = math.ceil((1e3 * seconds - sum(taken)) / max(once, 1e-3))
        taken += timed_calls([call] * max(count, repetitions - len(taken), 1), device)
        once = sum(taken) / len(taken)
    return taken


def timed_calls(calls: list[Callable[[], object]], device: str) -> list[float]:
    """Milliseconds of each of these calls."""
    if device == "cpu":
        marks = [time.perf_counter()]
        for call in calls:
            call()
            marks.append(time.perf_counter())
        return [1e3 * (b - a) for a, b in itertools.pairwise(marks)]
    # Events instead of the host's clock, so that the host runs ahead, as it does in training.
    events = [torch.cuda.Event(enable_timing=True) for _ in range(len(calls) + 1)]
    events[0].record()
    for call, event in zip(calls, events[1:], strict=True):
        call()
        event.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in itertools.pairwise(events)]


def product_rate(device: str, dtype: torch.dtype, size: int, seconds: float) -> float:
    """Sustained FLOP/s of products of two normal random (size, size) matrices.

    A GPU at its power limit runs a short product on a cool chip faster than a long one, so this is
    repeated for about as long as the measurement that it is compared with.
    """
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    taken = times(lambda: torch.mm(a, b, out=out), device, seconds, repetitions=2)
    return 2 * size**3 * len(taken) / (sum(taken) / 1e3)
