"""Memory besides the encoders' activations: weights, gradients, optimizer's state, and the loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from megabatch.config.objective import create_objective
from megabatch.config.settings import TrainConfig
from megabatch.hints import is_reference
from megabatch.planning.counter import counted
from megabatch.planning.loss_workspace import Run
from megabatch.planning.towers import AUTOCAST
from megabatch.similarity import ops, settings

#: Bytes of optimizer state per element of a parameter.
_STATE = {"adamw": 8.0, "lamb": 8.0, "lars": 4.0, "lion": 4.0, "sgd": 4.0}
_SMALLEST = 64 << 10


@dataclass(frozen=True)
class State:
    """Bytes on each device that do not depend on the batch.

    Attributes:
        weights, gradients, optimizer, average: with FSDP2, of the shards.
        whole_weights, whole_gradients: with FSDP2, the unsharded ones, from the first forward pass
            of a step to its end (ZeRO-2; see `megabatch.training.parallel`).
        update: temporary memory of the optimizer's step.
    """

    weights: int
    gradients: int
    optimizer: int
    average: int
    whole_weights: int
    whole_gradients: int
    update: int


def state_bytes(module: nn.Module, config: TrainConfig, ranks: int) -> State:
    """The state of a module that this many ranks train as configured."""
    parameters = list(module.parameters())
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    weights, gradients = (sum(p.nbytes for p in some) for some in (parameters, trained))
    optimizer = sum(_optimizer_bytes(config, parameter) for parameter in trained)
    average = 0 if config.ema_decay is None else sum(4 * p.numel() for p in trained)
    sharded = config.parallel == "fsdp" and ranks > 1
    # AdamW is one fused kernel, and so is SGD but for shards, which it updates all at once; the
    # others take one parameter at a time.
    largest = max((p.nbytes for p in trained), default=0)
    fused = {"adamw": 0, "sgd": gradients if sharded else 0}
    update = fused.get(config.opt, 2 * largest)
    n = ranks if sharded else 1
    return State(
        weights=-(-weights // n) + sum(buffer.nbytes for buffer in module.buffers()),
        gradients=-(-gradients // n),
        optimizer=-(-optimizer // n),
        average=-(-average // n),
        whole_weights=weights if sharded else 0,
        whole_gradients=gradients if sharded else 0,
        update=-(-update // n),
    )


def _optimizer_bytes(config: TrainConfig, parameter: Tensor) -> int:
    if config.opt != "adafactor":
        momentum = config.opt not in ("lars", "sgd") or config.momentum > 0
        return int(_STATE[config.opt] * parameter.numel()) if momentum else 0
    first = 2 * parameter.numel() if config.beta1 else 0  # in bfloat16
    shape = sorted(parameter.shape)
    if len(shape) < 2 or shape[-2] < 32:  # not factored
        return first + 4 * parameter.numel()
    rest = parameter.numel() // (shape[-1] * shape[-2])
    return first + 4 * rest * (shape[-1] + shape[-2])


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
    run = Run(limit, device == "cpu", ranks, hosts, columns)

    def workspace(overload: Any, arguments: Sequence[Any]) -> int:
        operator = ops.find(overload)
        return run.workspace(operator.name, *arguments[:2]) if operator else 0

    settings.set_workspace(limit if keeps else _SMALLEST)
    try:
        with counted(workspace) as counter:
            loss = prepare()
            start = counter.start()
            loss().backward()
            return counter.peak - start
    finally:
        settings.set_workspace(before)
