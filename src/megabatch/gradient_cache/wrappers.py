"""The modules of an encoder, and those that reduce gradients over ranks: DDP's and FSDP2's."""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import warnings
from collections.abc import Container, Iterable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from megabatch.ranks import all_gather_values, global_ranks
from megabatch.torch_internals import delays_all_reduce, fsdp_groups

ROOTS = (nn.Module, nn.Parameter)
#: Items of a list up to which it may be one of models; datasets are longer.
SHORT = 64

#: Training steps at whose beginning weights are compared; an update may take several steps.
WEIGHTS_COMPARED = (2, 10)
#: Relative difference that norms of equal weights may have between different kinds of GPUs.
TOLERANCE = 1e-9

#: Whether a wrapper's gradients are reduced to the shards' ranks, and over replicas.
Sync = tuple[bool, bool]


def modules_in(function: Any) -> list[nn.Module]:
    """The modules, with submodules, that a callable is, is a method of, or refers to."""
    roots = (root for root in _roots_in(function, set()) if isinstance(root, nn.Module))
    return list(dict.fromkeys(module for root in roots for module in root.modules()))


def parameters_in(function: Any) -> dict[str, Tensor]:
    """The parameters of the modules in `modules_in`, and those referred to directly, by name."""
    roots = dict.fromkeys(_roots_in(function, set()))
    return {
        f"{type(root).__name__} {i}: {name}" if len(roots) > 1 else name: parameter
        for i, root in enumerate(roots)
        for name, parameter in (
            root.named_parameters() if isinstance(root, nn.Module) else [("itself", root)]
        )
    }


def _roots_in(value: Any, seen: set[int]) -> Iterator[nn.Module | nn.Parameter]:
    """The modules and parameters that a callable is made of, refers to, or has as attributes."""
    if isinstance(value, ROOTS):
        yield value
    elif id(value) not in seen:
        seen.add(id(value))
        if isinstance(value, functools.partial):
            inside = [value.func, *value.args, *value.keywords.values()]
        elif inspect.ismethod(value):
            inside = [value.__self__]
        elif inspect.isfunction(value):
            scope = inspect.getclosurevars(value)
            # Among the globals there are libraries' functions, which lead anywhere.
            inside = [*scope.nonlocals.values(), *_roots_among(scope.globals.values())]
            inside += [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        else:
            inside = _roots_among([value, *getattr(value, "__dict__", {}).values()])
        for part in inside:
            yield from _roots_in(part, seen)


def _roots_among(values: Iterable[Any]) -> list[Any]:
    """The roots among the values, and among the items of short lists, tuples and dicts."""
    found: list[Any] = []
    for value in values:
        items = value.values() if isinstance(value, dict) else value
        short = isinstance(value, (list, tuple, dict)) and len(value) <= SHORT
        found += [item for item in (items if short else [value]) if isinstance(item, ROOTS)]
    return found


class Wrappers:
    """The DDP and FSDP2 modules of an encoder, with their settings when the step is called."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        """Find them among an encoder's modules; a ValueError if one cannot hold back reductions."""
        self._settings = {module: _sync(module) for module in modules if _reduces(module)}
        self._prepared = object()

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self._settings)

    def __bool__(self) -> bool:
        return bool(self._settings)

    @property
    def shards(self) -> bool:
        """Whether one is of FSDP2, which replaces shards by whole parameters for a while."""
        return not all(isinstance(module, DistributedDataParallel) for module in self)

    @contextlib.contextmanager
    def synchronising(self, allowed: bool) -> Iterator[None]:
        """Reduce gradients inside as at the time of the call if `allowed`, else not at all."""
        before = {module: _sync(module) for module in self}
        try:
            for module, sync in self._settings.items():
                _set_sync(module, sync if allowed else (False, False))
            yield
        finally:
            for module, sync in before.items():
                _set_sync(module, sync)

    def prepare(self) -> None:
        """Announce a forward pass with a graph, for which DDP prepares its reduction."""
        self._prepared = object()
        for module in self:
            _last_prepared[module] = self._prepared

    def are_prepared(self) -> bool:
        """Whether no other forward pass was announced since; DDP would reduce its gradients."""
        return all(_last_prepared.get(module) is self._prepared for module in self)

    def check_all_used(self, encoder: str, reached: Container[int]) -> None:
        """Raise UnusedParameters if DDP waits for a gradient of a parameter that gets none.

        `encoder`: its name; `reached`: ids of the tensors that will get a gradient.
        """
        for ddp in self:
            if not isinstance(ddp, DistributedDataParallel):
                continue
            if ddp.find_unused_parameters or not ddp.require_backward_grad_sync:
                continue
            waited_for = {
                name: id(parameter) in reached
                for name, parameter in ddp.module.named_parameters()
                if parameter.requires_grad and name not in ddp.parameters_to_ignore
            }
            # A wrapper that the encoder refers to, but does not call, waits for nothing.
            if any(waited_for.values()) and not all(waited_for.values()):
                unused = [name for name, is_reached in waited_for.items() if not is_reached]
                raise UnusedParameters(encoder, unused)


class UnusedParameters(RuntimeError):
    """DistributedDataParallel waits for gradients that never come; `names`: of the parameters."""

    def __init__(self, encoder: str, names: list[str]) -> None:
        more = f" and {len(names) - 5} more" if len(names) > 5 else ""
        self.names = f"{', '.join(names[:5])}{more}"
        super().__init__(
            f"GradientCache: {encoder} is wrapped in DistributedDataParallel, which waits for a "
            f"gradient of every trainable parameter, and there is none of {self.names}: freeze "
            "what is not used, call the wrapper itself, or pass find_unused_parameters=True"
        )


def check_layout(encoder: str, parameters: Iterable[Tensor]) -> None:
    """Raise a ValueError for parameters of FSDP1 or ZeRO 3, inside the encoder or around it."""
    for parameter in parameters:
        if hasattr(parameter, "_fsdp_flattened"):
            raise ValueError(
                f"encoders: FullyShardedDataParallel (FSDP1) reduces the gradients of {encoder} in "
                "every micro-batch; expected fully_shard (FSDP2)"
            )
        if hasattr(parameter, "ds_id"):
            raise ValueError(
                f"encoders: DeepSpeed's ZeRO 3 has only parts of the weights of {encoder} on each "
                "rank, also while its gradients are added up; expected ZeRO 1 or 2, or "
                "fully_shard (FSDP2)"
            )


def check_ddp_around(encoder: str, ddp: DistributedDataParallel | None) -> None:
    """Raise a RuntimeError if DDP around the step reduces `.grad`, to which micro-batches add."""
    if ddp is not None and ddp.require_backward_grad_sync:
        raise RuntimeError(
            f"GradientCache: gradients of {encoder} go to .grad in each micro-batch (with a "
            "reentrant checkpoint), and DistributedDataParallel around the step would reduce those "
            "of the first one alone: use checkpoints with use_reentrant=False, or wrap the "
            "encoders instead of the step"
        )


#: For each wrapper, the `Wrappers._prepared` of the last forward pass that was announced.
_last_prepared: WeakKeyDictionary[nn.Module, object] = WeakKeyDictionary()


def _reduces(module: Any) -> bool:
    if not isinstance(module, DistributedDataParallel):
        return hasattr(module, "set_requires_gradient_sync")
    for refused, present in (
        ("static_graph=True", module.static_graph),  # no_sync fails in an internal assertion
        ("delay_all_reduce_named_params=...", delays_all_reduce(module)),  # by hooks of their own
    ):
        if present:
            raise ValueError(
                f"encoders: DistributedDataParallel({refused}) cannot hold back its reduction of "
                "gradients; expected no such argument"
            )
    return True


def _sync(module: Any) -> Sync:
    if isinstance(module, DistributedDataParallel):
        return module.require_backward_grad_sync, module.require_backward_grad_sync
    groups = fsdp_groups(module)
    return (
        all(group.reduce_grads for group in groups),
        all(group.all_reduce_grads for group in groups),
    )


def _set_sync(module: Any, sync: Sync) -> None:
    reduce, all_reduce = sync
    if isinstance(module, DistributedDataParallel):
        module.require_backward_grad_sync = reduce
        return
    module.set_requires_gradient_sync(reduce, recurse=False)
    module.set_requires_all_reduce(all_reduce, recurse=False)


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
    """Whether ranks should have equal values: no shard of DTensor, DeepSpeed or Megatron."""
    shard = any(hasattr(parameter, name) for name in ("device_mesh", "ds_id"))
    compared = parameter.requires_grad and parameter.is_floating_point() and parameter.numel() > 0
    return compared and not shard and not getattr(parameter, "tensor_model_parallel", False)
