"""The time of a step of the trainer by its parts and by families of kernels, from torch.profiler.

`Profile` sets the marks of `Parts` as kernels of their own, between which those of a part lie in
time: on a GPU a kernel that sleeps for a cycle, on the CPU a range of the profiler.
"""

from __future__ import annotations

import bisect
import math
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from machinery.parts import Parts
from megabatch.training.trainer import Trainer

#: Inductor's elementwise kernels and sums are named after operators around them, too.
_NOT_FUSED = r"^(?!triton_(poi|per|red)).*"
#: Families by what the names of their kernels contain, the first that matches; on the CPU those of
#: operators.
FAMILIES = {
    "attention": _NOT_FUSED + r"(flash|fmha|sdpa|attention|dot_do_o|convert_dq)",
    "products": _NOT_FUSED + r"(gemm|nvjet|cutlass|xmma|cublas|splitk|triton_tem|::(add|b)?mm$)",
    "optimizer": r"multi_tensor|adam",
    "embeddings": r"embedding|index|gather|scatter|radix|sort|scan",
    "normalisation and activation": r"norm|gelu|softmax|sigmoid|tanh",
    "sums": r"reduce|_red_|_per_|::sum",
    "copies": r"memcpy|memset|copy|clone|cat|fill|stack|constant|attention|::to$",
}
OTHERS, GAPS = "other elementwise", "launch gaps"
#: Transfers from and to the host, in a stream of their own: beside the computation.
TRANSFERS = "transfers, hidden"
_MARK, _SLEEP = "step_time mark", "spin_kernel"


@dataclass(frozen=True)
class Event:
    """A kernel, or on the CPU an operator without those that it calls; seconds."""

    name: str
    family: str
    start: float
    seconds: float


class Profile(Parts):
    """Profiles a step of a trainer that keeps no activations while it is entered.

    Args:
        trainer: whose steps are profiled.
        repeats: how many times the loss gets the features, as if the batch were so much larger.
    """

    def __init__(self, trainer: Trainer, repeats: int = 1) -> None:
        super().__init__(trainer, repeats)
        self._names: list[str] = []
        activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * self._on_gpu]
        self._profiler = profile(activities=activities, record_shapes=True)

    def __enter__(self) -> Profile:
        self._profiler.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__()
        if self._on_gpu:
            torch.cuda.synchronize()
        self._profiler.__exit__(*error)
        self._read(self._profiler.events())

    def mark(self, name: str) -> None:
        """End the part before, and begin this one, on the host and in the stream."""
        self._names.append(name)
        with record_function(_MARK):
            if self._on_gpu:
                torch.cuda._sleep(1)

    def _read(self, events: Iterable[Any]) -> None:
        """Sort into parts: kernels, and operations of what the host called."""
        host = [e for e in events if e.device_type == DeviceType.CPU]
        # Kineto repeats the host's ranges on the GPU.
        on_gpu = [e for e in events if e.device_type != DeviceType.CPU and not e.is_user_annotation]
        host_marks = sorted(e.time_range.start for e in host if e.name == _MARK)
        marks = sorted(e.time_range.start for e in on_gpu if _SLEEP in e.name) or host_marks
        assert len(marks) == len(host_marks) == len(self._names)
        kernels = on_gpu if self._on_gpu else [e for e in host if e.name != _MARK]
        self.kernels: dict[str, list[Event]] = {name: [] for name in self._names[:-1]}
        self.operations: dict[str, Counter[str]] = {name: Counter() for name in self._names[:-1]}
        self.lengths: dict[str, float] = dict.fromkeys(self._names[:-1], 0.0)  # gaps included
        for event in kernels:
            took = event.time_range.elapsed_us() if self._on_gpu else event.self_cpu_time_total
            start = event.time_range.start
            if _SLEEP not in event.name and (part := self._part(marks, start)):
                found = Event(event.name, family(event.name), start / 1e6, took / 1e6)
                self.kernels[part].append(found)
        for event in host:
            if part := self._part(host_marks, event.time_range.start):
                self.operations[part].update(operations(event.name, event.input_shapes))
        for name, start, end in zip(self._names, marks, marks[1:], strict=False):
            self.lengths[name] += (end - start) / 1e6

    def _part(self, marks: list[float], start: float) -> str | None:
        place = bisect.bisect_right(marks, start) - 1
        return self._names[place] if 0 <= place < len(marks) - 1 else None

    def seconds_by_family(self, part: str, length: float) -> dict[str, float]:
        """The time of a part; its families but for transfers add up to its length.

        `length`: without the profiler, under which launches take longer.
        """
        found: dict[str, float] = {}
        for event in self.kernels[part]:
            name = "loss" if part == "loss" else event.family
            found[name] = found.get(name, 0.0) + event.seconds
        busy = sum(seconds for name, seconds in found.items() if name != TRANSFERS)
        return {**found, GAPS: max(0.0, length - busy)}


def family(name: str) -> str:
    """The family of a kernel, or of an operator of the CPU."""
    if re.search(r"memcpy (htod|dtoh)", name, re.I):
        return TRANSFERS
    matching = (kind for kind, words in FAMILIES.items() if re.search(words, name, re.I))
    return next(matching, OTHERS)


def operations(name: str, shapes: list[list[int]]) -> dict[str, int]:
    """The operations of a call of torch's products, or of attention, by family.

    Attention counts as the whole square, also under a causal mask; its backward pass has five
    products.
    """
    if name in ("aten::mm", "aten::bmm", "aten::addmm"):
        first, second = shapes[1:3] if name == "aten::addmm" else shapes[:2]
        return {"products": 2 * math.prod(first) * second[-1]}
    products = 5 if "backward" in name else 2
    if name.startswith("aten::_scaled_dot_product_"):
        (*batch, rows, width), columns = shapes[0], shapes[2][-2]
        return {"attention": 2 * products * math.prod(batch) * rows * columns * width}
    if name.startswith(("megabatch::short_attention", "megabatch::block_attention")):
        n, rows, _, heads, width = shapes[0]
        return {"attention": 2 * products * n * heads * rows * rows * width}
    return {}
