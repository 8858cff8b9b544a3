"""Memory that does not depend on the batch: weights, gradients, the optimizer's state."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor, nn

from megabatch.config.settings import TrainConfig

#: Bytes of optimizer state per element of a parameter.
_STATE = {"adamw": 8.0, "lamb": 8.0, "lars": 4.0, "lion": 4.0, "sgd": 4.0}


@dataclass(frozen=True)
class State:
    """Bytes on each device.

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
    weights, gradients = _sum(parameters), _sum(trained)
    buffers = _sum(module.buffers())
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
        weights=-(-weights // n) + buffers,
        gradients=-(-gradients // n),
        optimizer=-(-optimizer // n),
        average=-(-average // n),
        whole_weights=weights if sharded else 0,
        whole_gradients=gradients if sharded else 0,
        update=-(-update // n),
    )


def _sum(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


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
