"""The modules of an encoder, and those that reduce gradients over ranks: DDP's and FSDP2's."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Container, Iterable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from megabatch.torch_internals import delays_all_reduce, fsdp_groups

ROOTS = (nn.Module, nn.Parameter)
#: Items of a list up to which it may be one of models; datasets are longer.
SHORT = 64

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


def reduces_by_itself(modules: Iterable[nn.Module]) -> bool:
    """Whether FSDP1 is among them, which reduces gradients in each micro-batch."""
    names = {cls.__name__ for module in modules for cls in type(module).__mro__}
    return "FullyShardedDataParallel" in names


def check_ddp_around(encoder: str, wrapper: nn.Module | None) -> None:
    """Check, where several micro-batches add to `.grad`, that no DDP around the step reduces it.

    `wrapper`: the DistributedDataParallel in whose forward the step was called, if any.
    """
    if isinstance(wrapper, DistributedDataParallel) and wrapper.require_backward_grad_sync:
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
