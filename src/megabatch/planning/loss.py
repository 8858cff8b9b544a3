"""Memory and time of the loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megabatch.config.settings import TrainConfig
from megabatch.hints import is_reference
from megabatch.losses.objective import create_objective
from megabatch.losses.registry import TRAINABLE
from megabatch.planning.counter import counted
from megabatch.planning.simulation.hardware import Gpu
from megabatch.planning.towers import AUTOCAST
from megabatch.similarity import ops, settings
from megabatch.similarity.memory import Run

_SMALLEST = 64 << 10


def loss_bytes(
    config: TrainConfig,
    rows: int,
    width: int,
    dtype: torch.dtype,
    device: str,
    ranks: int,
    locked: frozenset[str] = frozenset(),
    hosts: int = 1,
    columns: int | None = None,
) -> int:
    """Peak memory of the loss in bytes, for `rows` pairs of this rank, besides the features (b, d).

    With hard negatives, besides theirs (b, k, d), too. It includes the features' gradients.
    `locked`: towers whose features need none. `hosts`: on which the ranks are, as many on each.
    `columns`: of a grid of ranks, 0: none; None: that which the library chooses. For a loss of the
    user's own it is these gradients alone: the rest is unknown.
    """
    if is_reference(config.loss):
        return (2 + config.hard_negatives - len(locked)) * rows * width * dtype.itemsize
    # Without ids, as fake ones have no values to check; they are a few bytes per row.
    objective = create_objective(replace(config, duplicates="negatives"), group="local")

    def prepare() -> Callable[[], Tensor]:
        x, y = (
            torch.empty(rows, width, dtype=dtype, requires_grad=tower not in locked)
            for tower in ("image", "text")
        )
        scale, bias = (torch.ones((), requires_grad=True) for _ in range(2))
        negatives = None
        if k := config.hard_negatives:
            negatives = torch.empty(rows, k, width, dtype=dtype, requires_grad=True)
        return lambda: objective(x, y, scale, bias, negative_features=negatives)

    enabled = config.precision in AUTOCAST
    with torch.autocast("cpu", AUTOCAST.get(config.precision), enabled=enabled):
        return planned_bytes(prepare, device, ranks, hosts, columns)


def planned_bytes(
    prepare: Callable[[], Callable[[], Tensor]],
    device: str,
    ranks: int,
    hosts: int = 1,
    columns: int | None = None,
) -> int:
    """Peak memory of a loss and its backward pass in bytes, besides its inputs.

    Args:
        prepare: makes the inputs, and returns the loss of them; called on fake tensors.
        device: "cpu" or "cuda". ranks: processes that share the batch. hosts: theirs. columns: of
            their grid, as in `loss_bytes`.
    """
    # Fake tensors are on the CPU, since a backward pass on CUDA needs a device. CUDA differs in the
    # operators' workspace, and in that no logits are saved (`softmax.saved_logits`).
    before = settings.set_workspace(None)
    limit = before or settings.DEFAULT_WORKSPACE[device]
    keeps = device == "cpu" and ranks == 1
    settings.set_workspace(limit if keeps else _SMALLEST)
    try:
        with counted(_workspace(Run(limit, device == "cpu", ranks, hosts, columns))) as counter:
            loss = prepare()
            start = counter.start()
            loss().backward()
            return counter.peak - start
    finally:
        settings.set_workspace(before)


def _workspace(run: Run) -> Callable[[Any, Sequence[Any]], int]:
    """Bytes that an operator of `megabatch.similarity` takes while it runs."""

    def workspace(overload: Any, arguments: Sequence[Any]) -> int:
        operator = ops.find(overload)
        if operator is None or operator.workspace is None:
            return 0
        return operator.workspace(run, *arguments)

    return workspace


def loss_seconds(config: TrainConfig, width: int, gpu: Gpu | None, ranks: int) -> float | None:
    """Seconds per step for the loss on such GPUs; None if they or the loss's work are not known.

    Transfers are not counted.
    """
    if gpu is None or config.precision == "fp32" or is_reference(config.loss):
        return None
    widths = sum(config.matryoshka_dims) or width
    logits = config.global_batch_size**2 * (1 + config.hard_negatives)
    operations = TRAINABLE[config.loss].work * logits * widths
    return gpu.sweep_seconds(operations / ranks, widths)
