"""State of the encoders' surroundings: generators, gradient reduction, running statistics."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import random
import sys
from collections.abc import Container, Iterable, Iterator
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from megabatch.torch_internals import (
    delays_all_reduce,
    fsdp_groups,
)

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)

#: Items of a list up to which it may be one of models; datasets are longer.
SHORT = 64


def cuda_devices(*tensors: Iterable[Tensor]) -> set[torch.device]:
    """The CUDA devices of the tensors, and the current one if CUDA is initialised."""
    devices = {tensor.device for tensor in itertools.chain(*tensors) if tensor.is_cuda}
    if torch.cuda.is_initialized():
        devices.add(torch.device("cuda", torch.cuda.current_device()))
    return devices


class RandomState(NamedTuple):
    """The state of the global generators: PyTorch's, Python's, and NumPy's if it is imported."""

    by_device: dict[torch.device, Tensor]
    python: tuple[Any, ...]
    numpy: dict[str, Any] | None


def get_random_state(devices: Iterable[torch.device]) -> RandomState:
    """The state of all generators: PyTorch's are the CPU's and those of the CUDA devices.

    Some models draw their masks or their layers by Python or NumPy (SpecAugment in transformers).
    """
    on_devices = {device: torch.cuda.get_rng_state(device) for device in devices}
    numpy = sys.modules.get("numpy.random")
    return RandomState(
        {torch.device("cpu"): torch.get_rng_state()} | on_devices,
        random.getstate(),
        None if numpy is None else numpy.get_state(legacy=False),
    )


def set_random_state(state: RandomState) -> None:
    """Restore a state from `get_random_state`."""
    for device, of_device in state.by_device.items():
        if device.type == "cpu":
            torch.set_rng_state(of_device)
        else:
            torch.cuda.set_rng_state(of_device, device)
    random.setstate(state.python)
    if state.numpy is not None:
        sys.modules["numpy.random"].set_state(state.numpy)


def modules_in(function: Any) -> list[nn.Module]:
    """The modules, with submodules, that a callable is, is a method of, or refers to."""
    modules = (module for root in _roots_in(function) for module in root.modules())
    return list(dict.fromkeys(modules))


def parameters_in(function: Any) -> dict[str, Tensor]:
    """The parameters of the modules in `modules_in`, by name."""
    if isinstance(function, nn.Module):
        return dict(function.named_parameters())
    roots = _roots_in(function)
    return {
        f"{type(root).__name__} {i}: {name}" if len(roots) > 1 else name: parameter
        for i, root in enumerate(roots)
        for name, parameter in root.named_parameters()
    }


def _roots_in(function: Any) -> list[nn.Module]:
    return list(dict.fromkeys(_found_in(function, set())))


def _found_in(value: Any, seen: set[int]) -> Iterator[nn.Module]:
    """The modules that a callable is made of, refers to, or has among its object's attributes."""
    if isinstance(value, nn.Module):
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
            inside = [*scope.nonlocals.values(), *_modules_among(scope.globals.values())]
            inside += [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        else:
            inside = _modules_among([value, *getattr(value, "__dict__", {}).values()])
        for part in inside:
            yield from _found_in(part, seen)


def _modules_among(values: Iterable[Any]) -> list[nn.Module]:
    """Those that are modules, or items of a short list, tuple or dict."""
    found: list[nn.Module] = []
    for value in values:
        items = value.values() if isinstance(value, dict) else value
        short = isinstance(value, (list, tuple, dict)) and len(value) <= SHORT
        found += [item for item in (items if short else [value]) if isinstance(item, nn.Module)]
    return found


def gradient_wrappers(modules: list[nn.Module]) -> list[nn.Module]:
    """The modules that reduce gradients over ranks: those of DDP and FSDP2."""
    wrappers: list[nn.Module] = []
    for module in modules:
        if isinstance(module, DistributedDataParallel):
            if module.static_graph:  # PyTorch's no_sync then fails in an internal assertion
                raise ValueError(
                    "encoders: DistributedDataParallel(static_graph=True) cannot hold back its "
                    "synchronisation; expected static_graph=False"
                )
            if delays_all_reduce(module):  # by a hook, which no_sync does not hold back
                raise ValueError(
                    "encoders: DistributedDataParallel(delay_all_reduce_named_params=...) cannot "
                    "hold back the reduction of these parameters; expected None"
                )
            wrappers.append(module)
        elif hasattr(module, "set_requires_gradient_sync"):
            wrappers.append(module)
    return wrappers


def reduces_by_itself(modules: Iterable[nn.Module]) -> bool:
    """Whether FSDP1 is among them, which reduces gradients in each micro-batch."""
    names = {cls.__name__ for module in modules for cls in type(module).__mro__}
    return "FullyShardedDataParallel" in names


def sync_settings(wrappers: Iterable[nn.Module]) -> dict[nn.Module, Sync]:
    """The current settings of each wrapper, which a user's `no_sync` may have changed."""
    return {wrapper: _sync(wrapper) for wrapper in wrappers}


@contextlib.contextmanager
def with_sync(settings: dict[nn.Module, Sync]) -> Iterator[None]:
    """Apply these settings inside, and restore the previous ones afterwards."""
    before = sync_settings(settings)
    try:
        for wrapper, sync in settings.items():
            _set_sync(wrapper, sync)
        yield
    finally:
        for wrapper, sync in before.items():
            _set_sync(wrapper, sync)


def prepare(wrappers: Iterable[nn.Module]) -> object:
    """Announce a forward pass with a graph, in which wrappers prepare to reduce gradients.

    Returns:
        A token for `are_prepared`.
    """
    preparation = object()
    for wrapper in wrappers:
        _prepared[wrapper] = preparation
    return preparation


def are_prepared(wrappers: Iterable[nn.Module], preparation: object) -> bool:
    """Whether no wrapper has been prepared for another forward pass since.

    DDP does not reduce the gradients of the earlier one.
    """
    return all(_prepared[wrapper] is preparation for wrapper in wrappers)


_prepared: WeakKeyDictionary[nn.Module, object] = WeakKeyDictionary()


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


def check_all_used(encoder: str, wrappers: Iterable[nn.Module], reached: Container[int]) -> None:
    """Check, before gradients are reduced, that DDP will get all that it waits for.

    Args:
        encoder: its name, for messages.
        wrappers: of the encoder.
        reached: ids of the tensors that will get a gradient.

    Raises:
        UnusedParameters: it will not, and would fail in the next step with another message.
    """
    for wrapper in wrappers:
        if not isinstance(wrapper, DistributedDataParallel):
            continue
        if wrapper.find_unused_parameters or not wrapper.require_backward_grad_sync:
            continue
        waited_for = {
            name: id(parameter) in reached
            for name, parameter in wrapper.module.named_parameters()
            if parameter.requires_grad and name not in wrapper.parameters_to_ignore
        }
        unused = [name for name, is_reached in waited_for.items() if not is_reached]
        # A wrapper that the encoder refers to, but does not call, waits for nothing.
        if 0 < len(unused) < len(waited_for):
            raise UnusedParameters(encoder, unused)


class Sync(NamedTuple):
    """Whether a wrapper's gradients are reduced to the shards' ranks, and over replicas."""

    reduce: bool
    all_reduce: bool


def no_sync(wrappers: Iterable[nn.Module]) -> dict[nn.Module, Sync]:
    """Settings that leave the wrappers' gradients on their ranks."""
    return dict.fromkeys(wrappers, Sync(False, False))


def _sync(wrapper: nn.Module) -> Sync:
    if isinstance(wrapper, DistributedDataParallel):
        return Sync(wrapper.require_backward_grad_sync, wrapper.require_backward_grad_sync)
    groups = fsdp_groups(wrapper)
    return Sync(
        all(group.reduce_grads for group in groups), all(group.all_reduce_grads for group in groups)
    )


def _set_sync(wrapper: Any, sync: Sync) -> None:
    if isinstance(wrapper, DistributedDataParallel):
        wrapper.require_backward_grad_sync = sync.reduce
        return
    wrapper.set_requires_gradient_sync(sync.reduce, recurse=False)
    wrapper.set_requires_all_reduce(sync.all_reduce, recurse=False)


@contextlib.contextmanager
def keep_running_statistics(modules: list[nn.Module]) -> Iterator[None]:
    """Let training-mode normalisation use a batch's statistics inside without recording them."""
    with contextlib.ExitStack() as stack:
        for module in modules:
            if not (module.training and getattr(module, "track_running_stats", False)):
                continue
            if isinstance(module, BATCH_NORMS):
                stack.callback(setattr, module, "track_running_stats", True)
                module.track_running_stats = False
            elif isinstance(module, INSTANCE_NORMS):
                stack.callback(setattr, module, "momentum", module.momentum)
                module.momentum = 0.0
        yield
