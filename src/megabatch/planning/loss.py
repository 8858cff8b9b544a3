"""Memory and time of the loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megabatch.config.settings import TrainConfig
from megabatch.losses.objective import create_objective
from megabatch.losses.registry import TRAINABLE
from megabatch.planning.counter import counted
from megabatch.planning.towers import AUTOCAST
from megabatch.similarity import sweep
from megabatch.similarity.arguments import accumulator_dtype
from megabatch.similarity.backends.triton.blocking import block_shape, padded
from megabatch.similarity.distributed import ring

#: FLOP/s of CLIP's loss in half precision, by part of the GPU's name, with 8 b^2 d operations per
#: loss (benchmarks/results/single-gpu.json: 575 to 605 TFLOP/s at d = 512 to 1,024, b = 65,536).
RATES = {"H200": 590e12}

_SMALLEST = 64 << 10


def loss_bytes(
    config: TrainConfig,
    rows: int,
    width: int,
    dtype: torch.dtype,
    device: str,
    ranks: int,
    locked: frozenset[str] = frozenset(),
) -> int:
    """Peak memory of the loss in bytes, for `rows` pairs of this rank, beside the features (b, d).

    It includes the features' gradients. `locked`: towers whose features need none.
    """
    # Without ids, as fake ones have no values to check; they are a few bytes per row. Fake tensors
    # are on the CPU, since a backward pass on CUDA needs a device. CUDA differs in the operators'
    # workspace, and in that no logits are kept (`sweep.kept_size`).
    objective = create_objective(replace(config, duplicates="negatives"), group="local")
    before = sweep.set_workspace(None)
    limit = before or sweep.DEFAULT_WORKSPACE[device]
    keeps = device == "cpu" and ranks == 1
    sweep.set_workspace(limit if keeps else _SMALLEST)
    try:
        with counted(_inside(limit, device, ranks)) as counter:
            x, y = (
                torch.empty(rows, width, dtype=dtype, requires_grad=tower not in locked)
                for tower in ("image", "text")
            )
            scale, bias = (torch.ones((), requires_grad=True) for _ in range(2))
            start = counter.start()
            enabled = config.precision in AUTOCAST
            with torch.autocast("cpu", AUTOCAST.get(config.precision), enabled=enabled):
                loss = objective(x, y, scale, bias)
            loss.backward()
            return counter.peak - start
    finally:
        sweep.set_workspace(before)


def _inside(limit: int, device: str, ranks: int) -> Callable[[str, Sequence[Any]], int]:
    """The workspace of an operator of `megabatch.similarity`, beside its results."""

    def inside(name: str, args: Sequence[Any]) -> int:
        kind = name.removeprefix("megabatch::").split(".")[0]
        if kind not in ("statistics", "statistics_backward", "softplus_sum"):
            return 0
        x: Tensor = args[0]
        y: Tensor = x if args[1] is None else args[1]
        if device == "cpu":
            block, side = _block_on_cpu(x, y, limit)
        else:
            columns = len(y)  # at a time
            if ranks > 1 and args[1] is not None:
                columns = ranks * _round(x, ranks) or min(ring.piece_rows(x), len(x))
            block, side = _block_on_gpu(x, columns, y is x, limit)
        block += 0 if device == "cpu" else _padded(x, args[1])
        travelling = _travelling(x, args[1], ranks)
        if kind == "statistics":
            return (block if device == "cpu" else block // 4) + travelling
        row = x.shape[1] * accumulator_dtype(x.dtype).itemsize
        if kind == "softplus_sum":  # accumulators: all columns and a strip of rows; or x
            gradients = len(y) + min(side, len(x)) if ranks == 1 else len(x)
            return block + row * gradients + travelling
        if args[1] is None or ranks > 1:  # an accumulator of all rows
            product = row * min(4096, len(x)) if device == "cpu" else 0  # for scale's gradient
            passing = block + product + travelling
            if device != "cpu" and args[1] is not None:
                # x's gradient is written after these are freed, except for the last round's.
                passing = max(_gathered(x, ranks, 1, 1), passing - x.nbytes)
            return row * len(x) + passing
        upstream = 0 if device == "cpu" else 20 * (len(x) + len(y))
        # Accumulators of all columns and of a strip of rows.
        return block + row * (len(y) + min(side, len(x))) + upstream

    return inside


def _block_on_cpu(x: Tensor, y: Tensor, limit: int) -> tuple[int, int]:
    """A block's bytes and its rows."""
    before = sweep.set_workspace(limit)
    rows, columns = sweep.block_shape(x)
    sweep.set_workspace(before)
    rows, columns = min(rows, len(x)), min(columns, len(y))
    item = accumulator_dtype(x.dtype).itemsize
    copies = 0 if x.element_size() == item else x.shape[1] * (rows + columns)
    return item * (6 * rows * columns + copies), rows


def _block_on_gpu(x: Tensor, n: int, symmetric: bool, limit: int) -> tuple[int, int]:
    """A block's bytes and its rows, with n columns at a time."""
    item = x.element_size()
    rows, columns = block_shape(len(x), n, x.shape[1], item, symmetric, limit)
    return item * min(rows, len(x)) * min(columns, n), rows


def _padded(x: Tensor, y: Tensor | None) -> int:
    """Bytes of the padded copies that kernels need if rows are no multiple of 16 bytes."""
    width = padded(x.shape[1], x.element_size())
    if width == x.shape[1]:
        return 0
    return (len(x) + (0 if y is None else len(y))) * width * x.element_size()


def _travelling(x: Tensor, y: Tensor | None, ranks: int) -> int:
    """Bytes of other ranks' features and gradients, for shards of equal size."""
    if ranks == 1:
        return 0
    width, own, item = x.shape[1], x.element_size(), accumulator_dtype(x.dtype).itemsize
    rows = _round(x, ranks)
    if y is None or rows == 0:  # a ring: two pieces of features and three of gradients
        return min(ring.piece_rows(x), len(x)) * width * (2 * own + 3 * item)
    if rows == len(x):
        return _gathered(x, ranks, 1, 1)
    # Three rounds of features: the current one, the next one on its way, and the last one, which
    # its closure still holds; two of gradients: the current ones and those being reduced.
    return _gathered(x, ranks, 3, 2)


def _gathered(x: Tensor, ranks: int, features: int, gradients: int) -> int:
    """Bytes of all ranks' features of this many rounds, and of their gradients of this many."""
    item = accumulator_dtype(x.dtype).itemsize
    sizes = features * x.element_size() + gradients * item
    return _round(x, ranks) * ranks * x.shape[1] * sizes


def _round(x: Tensor, ranks: int) -> int:
    """Rows of each rank that a round gathers; 0 if the ring is used instead."""
    return ring.round_rows(len(x), ranks * x.shape[1] * x.element_size())


def loss_seconds(config: TrainConfig, width: int, name: str, ranks: int) -> float | None:
    """Seconds per step for the loss, if the rate of such GPUs has been measured; else None."""
    rate = next((rate for part, rate in RATES.items() if part in name), None)
    if rate is None or config.precision == "fp32":
        return None
    widths = sum(config.matryoshka_dims) or width
    return TRAINABLE[config.loss].work * config.global_batch_size**2 * widths / ranks / rate
