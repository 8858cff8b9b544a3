"""Checks for mistakes that nothing else reports.

Ranks that drift apart, tensors changed between the passes, passes that compute different functions,
a left-out `backward()`.
"""

from __future__ import annotations

import contextlib
import functools
import math
import struct
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook

from megabatch.gradient_cache.batches import named_tensors
from megabatch.gradient_cache.outputs import Outputs
from megabatch.ranks import all_gather_numbers
from megabatch.torch_internals import version_of

#: Training steps at whose beginning weights are compared: after the first update, and later, since
#: an update may take several steps.
STEPS = (2, 10)
#: Parameters compared.
PARAMETERS = 4
#: Relative difference that sums of equal weights may have between different kinds of GPUs.
TOLERANCE = 1e-9

#: Training steps whose two passes are compared. Later ones too: with weights that start at zero a
#: difference may not show in the first step.
COMPARED = (1, 10, 100, 1000)
#: Relative difference in norm that features may have between the passes. The kernels may differ, as
#: only the second one records a graph; rounding in half precision should stay below this.
DIFFERENCE = 0.05

_NOTHING = [0] * PARAMETERS


class OutOfMemoryOnAllRanks(torch.OutOfMemoryError):
    """Memory ran out on a rank, and all ranks stopped at the same place: they may try again."""


@contextlib.contextmanager
def out_of_memory_on_all_ranks(call: str, group: Any) -> Iterator[None]:
    """Raise an OutOfMemoryOnAllRanks on all ranks if memory runs out inside on one of them.

    Inside there must be no exchange between ranks. `call`: what it is, for messages.
    """
    failed = False
    try:
        yield
    except torch.OutOfMemoryError:  # raised again below, where it keeps no tensors alive
        failed = True
    table = all_gather_numbers(call, [int(failed)], group)
    if any(row[0] for row in table):
        ranks = ", ".join(str(rank) for rank, row in enumerate(table) if row[0])
        raise OutOfMemoryOnAllRanks(f"{call}: out of memory on rank {ranks}")


class DriftCheck:
    """Compares a few parameters over the ranks, and warns once if they differ.

    It compares sums of elements, which are part of the ranks' exchange at each step. Only the steps
    in `STEPS` wait for a GPU.
    """

    def __init__(self) -> None:
        self._step = 0
        self._compared: list[str] = []
        self._warned = False

    def numbers(self, parameters: Iterable[tuple[str, Tensor]]) -> list[int]:
        """Return this rank's part of the exchange at the next training step, PARAMETERS numbers.

        Args:
            parameters: with their names, in the same order on each rank.
        """
        self._step += 1
        self._compared = []
        if self._step not in STEPS or self._warned:
            return _NOTHING
        chosen = _spread([(name, p) for name, p in parameters if _replicated(p)])
        self._compared = [name for name, _ in chosen]
        sums = [float(p.detach().sum(dtype=torch.float64)) for _, p in chosen]
        return [*map(_bits, sums), *_NOTHING[len(sums) :]]

    def compare(self, table: Sequence[Sequence[int]], ranks: Sequence[int]) -> None:
        """Warn on the first rank if the rows of the table differ; there is one per rank."""
        for name, *bits in zip(self._compared, *table, strict=False):
            sums = [_number(value) for value in bits]
            other = next((i for i in range(len(sums)) if not _close(sums[i], sums[0])), None)
            if other is None:
                continue
            self._warned = True
            if ranks[0] == torch.distributed.get_rank():
                warnings.warn(self._message(name, ranks, sums, other), stacklevel=4)
            return

    def _message(self, name: str, ranks: Sequence[int], sums: Sequence[float], other: int) -> str:
        return (
            f"GradientCache: the weights of the ranks differ at the beginning of step {self._step}:"
            f" the elements of {name} add up to {sums[0]:.9g} on rank {ranks[0]} and "
            f"{sums[other]:.9g} on rank {ranks[other]}, a difference of "
            f"{abs(sums[0] - sums[other]):.3g}. Nothing seems to average gradients over the ranks: "
            "wrap each encoder, or the model that has them, in DistributedDataParallel or "
            "fully_shard, and start all ranks from the same weights; or pass group='local' if "
            "each rank is to train weights of its own"
        )


def _replicated(parameter: Tensor) -> bool:
    """Whether ranks should have equal values: no shard of DTensor, FSDP, DeepSpeed or Megatron."""
    return (
        parameter.requires_grad
        and parameter.is_floating_point()
        and parameter.numel() > 0
        and not hasattr(parameter, "device_mesh")
        and not hasattr(parameter, "_fsdp_flattened")
        and not hasattr(parameter, "ds_id")
        and not getattr(parameter, "tensor_model_parallel", False)
    )


def _spread(parameters: list[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    """Choose PARAMETERS of them, evenly, from the first to the last."""
    last = len(parameters) - 1
    chosen = {round(i * last / (PARAMETERS - 1)) for i in range(PARAMETERS)} if parameters else ()
    return [parameters[i] for i in sorted(chosen)]


def _close(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=TOLERANCE) or (math.isnan(a) and math.isnan(b))


def _bits(number: float) -> int:
    (bits,) = struct.unpack("q", struct.pack("d", number))
    return int(bits)


def _number(bits: int) -> float:
    (number,) = struct.unpack("d", struct.pack("q", bits))
    return float(number)


class _Watched:
    """A tensor with its version, and with its memory, which `parameter.data = ...` replaces.

    As the old memory is held, the new one cannot have its address.
    """

    def __init__(self, name: str, tensor: Tensor) -> None:
        self.name = name
        self.tensor = tensor
        self.version = version_of(tensor)
        self.memory = tensor.detach() if _stays_in_place(tensor) else None

    def changed(self) -> bool:
        return version_of(self.tensor) != self.version or self._has_other_values()

    def _has_other_values(self) -> bool:
        """Whether other memory has other values; those of a cast or a copy are the same."""
        before, now = self.memory, self.tensor.detach()
        if before is None or before.data_ptr() == now.data_ptr() or before.shape != now.shape:
            return False
        return not torch.equal(before.to(now), now)


class Versions:
    """Saved versions of an encoder's parameters and batches, to find changes of them."""

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        batches: Mapping[str, Any],
        wrappers: Collection[nn.Module],
    ) -> None:
        """Save them; names are for messages. Rows that are made on access have no version."""
        # FSDP2 replaces shards by whole parameters while it needs them.
        self._sharded = any(not isinstance(w, DistributedDataParallel) for w in wrappers)
        self._parameters: list[_Watched] = []
        self.watch((f"parameter {name}", parameter) for name, parameter in parameters.items())
        self._batches = [
            _Watched(inner, tensor)
            for name, batch in batches.items()
            for inner, tensor in named_tensors(batch, name).items()
            if not tensor.is_inference()
        ]

    def watch(self, parameters: Iterable[tuple[str, Tensor]]) -> None:
        """Save versions of further parameters, with their names."""
        known = {id(watched.tensor) for watched in self._parameters}
        for name, parameter in parameters:
            whole = self._sharded and not hasattr(parameter, "device_mesh")
            if not whole and id(parameter) not in known and not parameter.is_inference():
                self._parameters.append(_Watched(name, parameter))

    def changed(self) -> str:
        """The name of a tensor that was changed since; "" if none was."""
        return self.changed_parameter() or _first_changed(self._batches)

    def changed_parameter(self) -> str:
        """The same, of parameters alone."""
        return _first_changed(self._parameters)


def _first_changed(watched: Iterable[_Watched]) -> str:
    return next((tensor.name for tensor in watched if tensor.changed()), "")


def _stays_in_place(tensor: Tensor) -> bool:
    """Whether nobody moves it: not FSDP1, DeepSpeed, or DistributedDataParallel's own precision."""
    plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
    moved = any(hasattr(tensor, name) for name in ("_fsdp_flattened", "ds_id", "_mp_param"))
    return plain and not tensor.is_meta and not moved


def check_hooks(encoder: str, versions: Versions, leaves: Iterable[Tensor]) -> None:
    """Check that no earlier micro-batch's backward pass has changed weights.

    An optimizer in a hook on gradients does, where hooks see each micro-batch's gradient.

    Args:
        encoder: its name, for messages.
        versions: of its parameters.
        leaves: parameters of the graph that may be out of sight, to be watched as well.
    """
    hidden = [leaf for leaf in leaves if isinstance(leaf, nn.Parameter)]
    versions.watch((f"a parameter {(*p.shape,)}, out of sight,", p) for p in hidden)
    changed = versions.changed_parameter()
    if changed:
        raise RuntimeError(
            f"GradientCache: {changed} of {encoder} was changed during the backward pass, before "
            "its last micro-batch: a hook on gradients steps an optimizer. Here hooks are called "
            "for each micro-batch (with DistributedDataParallel, a reentrant checkpoint, or a "
            "parameter that is out of sight, inside an encoder): call optimizer.step() after "
            "loss.backward() instead. Weights have changed: start anew"
        )


def check_ddp_around(encoder: str, wrapper: nn.Module | None) -> None:
    """Check, where several micro-batches add to `.grad`, that no DDP around the step reduces it.

    Args:
        encoder: its name, for messages.
        wrapper: the DistributedDataParallel in whose forward the step was called, if any.
    """
    if isinstance(wrapper, DistributedDataParallel) and wrapper.require_backward_grad_sync:
        raise RuntimeError(
            f"GradientCache: {encoder} has gradients that go to .grad in each micro-batch (of a "
            "reentrant checkpoint, or a parameter that is out of sight), and "
            "DistributedDataParallel around the step would reduce those of the first one alone: "
            "use checkpoints with use_reentrant=False, or wrap the encoders instead of the step"
        )


class PassesCheck:
    """Compares features of both passes in a few steps, and warns once if they differ.

    The passes compute the same function, unless the encoder depends on something that is not
    replayed. Only the steps in `COMPARED` wait for a GPU.
    """

    def __init__(self) -> None:
        self._warned = False

    def wanted(self, step: int) -> bool:
        """Whether to compare in this training step, the first of which is 1."""
        return step in COMPARED and not self._warned

    def compare(self, encoder: str, first: Outputs, second: Outputs) -> None:
        """Warn if these outputs of an encoder, of one micro-batch in both passes, differ."""
        pairs = [(a, second.get(key)) for key, a in first.items()]
        most = max(
            (_difference(a, b) for a, b in pairs if a is not None and b is not None), default=0
        )
        if most <= DIFFERENCE or self._warned:
            return
        self._warned = True
        warnings.warn(
            f"GradientCache: {encoder} gave different features in the second pass than in the "
            f"first: they differ by {most:.1%} in norm, so its gradients are not those of the "
            "loss. Its forward pass depends on something that changed in between: a "
            "torch.Generator of its own, an attribute that it updates and that is not a buffer, "
            "or whether gradients are recorded. Remove this from the encoder, or keep it "
            "constant while a step and its backward() run",
            stacklevel=2,
        )


def _difference(first: Tensor, second: Tensor) -> float:
    """The norm of the difference relative to that of the first tensor; 0 where there is none."""
    if not first.is_floating_point() or first.shape != second.shape:
        return 0.0
    a, b = (
        tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32))
        for tensor in (first, second)
    )
    relative = float(torch.linalg.vector_norm(a - b) / torch.linalg.vector_norm(a))
    return 0.0 if math.isnan(relative) else relative


class UnusedLoss:
    """A step's loss that has not been backpropagated yet.

    It finds loops that never call `backward()`. Nothing else would report them: the optimizer skips
    parameters without a gradient.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._parameters = {id(parameter) for parameter in parameters}
        self.optimizer_stepped = False
        _watch_optimizers()
        _unused.add(self)

    def used(self) -> None:
        """Note that its backward pass begins."""
        _unused.discard(self)

    def note(self, optimizer: torch.optim.Optimizer) -> None:
        """Note that an optimizer has stepped."""
        groups = optimizer.param_groups
        if any(
            id(parameter) in self._parameters for group in groups for parameter in group["params"]
        ):
            self.optimizer_stepped = True

    def raise_if_left_out(self) -> None:
        """Report before the next step that this one's `backward()` was left out.

        A loss that is only read or discarded, without an optimizer step after it, is no mistake.

        Raises:
            RuntimeError: an optimizer with its parameters has stepped since.
        """
        if self in _unused and self.optimizer_stepped:
            self.used()
            raise RuntimeError(
                "GradientCache: an optimizer stepped, but the loss of the previous step was "
                "never backpropagated: call loss.backward() before optimizer.step() (a step no "
                "longer fills .grad by itself), or call the step under torch.no_grad() if you "
                "only need the value of its loss"
            )


_unused: WeakSet[UnusedLoss] = WeakSet()


@functools.cache
def _watch_optimizers() -> None:
    register_optimizer_step_post_hook(_note_all)


def _note_all(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for unused in list(_unused):
        unused.note(optimizer)
