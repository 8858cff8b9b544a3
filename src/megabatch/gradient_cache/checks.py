"""Checks for mistakes that nothing else reports, and for memory that runs out on one rank."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from megabatch.gradient_cache.outputs import Outputs
from megabatch.ranks import all_gather_numbers, all_gather_values, global_ranks

#: Training steps at whose beginning weights are compared; an update may take several steps.
WEIGHTS_COMPARED = (2, 10)
#: Relative difference that norms of equal weights may have between different kinds of GPUs.
TOLERANCE = 1e-9

#: Training steps whose two passes are compared; weights that start at zero may hide a difference.
FEATURES_COMPARED = (1, 10, 100, 1000)
#: Relative difference in norm that features may have between the passes: rounding stays below it.
DIFFERENCE = 0.05


class OutOfMemoryOnAllRanks(torch.OutOfMemoryError):
    """Memory ran out on a rank, and all ranks stopped at the same place: they may try again."""


@contextlib.contextmanager
def out_of_memory_on_all_ranks(call: str, group: Any) -> Iterator[None]:
    """Raise an OutOfMemoryOnAllRanks on all ranks if memory runs out inside on one of them.

    Inside there must be no exchange between ranks. `call`: for messages.
    """
    failed = False
    try:
        yield
    except torch.OutOfMemoryError:  # raised again below, where it keeps no tensors alive
        failed = True
    table = all_gather_numbers(call, [int(failed)], group)
    ranks = ", ".join(str(rank) for rank, (out,) in enumerate(table) if out)
    if ranks:
        raise OutOfMemoryOnAllRanks(f"{call}: out of memory on rank {ranks}")


def weights_differ(step: int, parameters: Iterable[Tensor], group: Any) -> bool:
    """Whether the 1-norm of any of the parameters differs between ranks, of which the first warns.

    `step`: its number, for the message.
    """
    norms = [
        float(torch.linalg.vector_norm(p.detach(), 1, dtype=torch.float64))
        for p in parameters
        if _is_replicated(p)
    ]
    (first, own), *others = zip(global_ranks(group), all_gather_values(norms, group), strict=True)
    differing = [
        (a, rank, b)
        for rank, found in others
        for a, b in zip(own, found, strict=False)
        if not (math.isclose(a, b, rel_tol=TOLERANCE) or (math.isnan(a) and math.isnan(b)))
    ]
    if differing and first == torch.distributed.get_rank():
        a, rank, b = differing[0]
        warnings.warn(
            f"GradientCache: the weights of the ranks differ at the beginning of step {step}: the "
            f"1-norm of a parameter is {a:.9g} on rank {first} and {b:.9g} on rank {rank}. Nothing "
            "seems to average gradients over the ranks: wrap each encoder, or the model that has "
            "them, in DistributedDataParallel or fully_shard, and start all ranks from the same "
            "weights; or pass group='local' if each rank is to train weights of its own",
            stacklevel=4,
        )
    return bool(differing)


def _is_replicated(parameter: Tensor) -> bool:
    """Whether ranks should have equal values: no shard of DTensor, FSDP, DeepSpeed or Megatron."""
    shard = any(hasattr(parameter, name) for name in ("device_mesh", "_fsdp_flattened", "ds_id"))
    compared = parameter.requires_grad and parameter.is_floating_point() and parameter.numel() > 0
    return compared and not shard and not getattr(parameter, "tensor_model_parallel", False)


class PassesCheck:
    """Compares features of both passes in a few steps, which wait for a GPU; warns once."""

    def __init__(self) -> None:
        self._warned = False

    def wanted(self, step: int) -> bool:
        """Whether to compare in this training step, the first of which is 1."""
        return step in FEATURES_COMPARED and not self._warned

    def compare(self, encoder: str, first: Outputs, second: Outputs) -> None:
        """Warn if these outputs of an encoder, of one micro-batch in both passes, differ."""
        pairs = [(a, second.get(key)) for key, a in first.items()]
        differences = [_difference(a, b) for a, b in pairs if a is not None and b is not None]
        if self._warned or max(differences, default=0) <= DIFFERENCE:
            return
        self._warned = True
        warnings.warn(
            f"GradientCache: {encoder} gave different features in the second pass than in the "
            f"first: they differ by {max(differences):.1%} in norm, so its gradients are not those "
            "of the loss. Its forward pass depends on something that changed in between: a "
            "torch.Generator of its own, an attribute that it updates and that is not a buffer, "
            "or whether gradients are recorded. Remove this from the encoder, or keep it "
            "constant while a step and its backward() run",
            stacklevel=2,
        )


def _difference(first: Tensor, second: Tensor) -> float:
    """The norm of the difference relative to that of the first tensor; 0 where there is none."""
    if not first.is_floating_point() or first.shape != second.shape:
        return 0.0
    a, b = (t.detach().to(torch.promote_types(t.dtype, torch.float32)) for t in (first, second))
    relative = float(torch.linalg.vector_norm(a - b) / torch.linalg.vector_norm(a))
    return 0.0 if math.isnan(relative) else relative


class PendingLoss:
    """A step's loss that has not been backpropagated yet; it finds loops without `backward()`.

    Nothing else would report them, as the optimizer skips parameters without a gradient.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        """`parameters`: those that the loss depends on."""
        self._parameters = {id(parameter) for parameter in parameters}
        self._optimizer_stepped = False
        self._hook = register_optimizer_step_post_hook(self._note_step)

    def _note_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
        self._optimizer_stepped |= not stepped.isdisjoint(self._parameters)

    def backpropagated(self) -> None:
        """Note that its backward pass begins."""
        self._hook.remove()
        self._optimizer_stepped = False

    def raise_if_left_out(self) -> None:
        """Raise a RuntimeError before the next step if an optimizer has stepped without it."""
        left_out = self._optimizer_stepped
        self.backpropagated()  # is not asked again
        if left_out:
            raise RuntimeError(
                "GradientCache: an optimizer stepped, but the loss of the previous step was never "
                "backpropagated: call loss.backward() before optimizer.step() (a step does not "
                "fill .grad by itself), or call the step under torch.no_grad() if you only need "
                "the value of its loss"
            )
