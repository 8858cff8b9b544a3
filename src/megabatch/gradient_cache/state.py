"""State around the encoders: random generators, gradient synchronisation, running statistics."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from megabatch.torch_internals import is_batch_norm, is_instance_norm


def cuda_devices(*tensors: Iterable[Tensor]) -> set[torch.device]:
    """The CUDA devices of the tensors, and the current one if CUDA is in use."""
    devices = {tensor.device for tensor in itertools.chain(*tensors) if tensor.is_cuda}
    if torch.cuda.is_initialized():
        devices.add(torch.device("cuda", torch.cuda.current_device()))
    return devices


def get_random_state(devices: Iterable[torch.device]) -> dict[torch.device, Tensor]:
    """The state of PyTorch's generators: the CPU's and those of the CUDA devices."""
    states = {torch.device("cpu"): torch.get_rng_state()}
    return states | {device: torch.cuda.get_rng_state(device) for device in devices}


def set_random_state(states: dict[torch.device, Tensor]) -> None:
    """Put back what `get_random_state` gave."""
    for device, state in states.items():
        if device.type == "cpu":
            torch.set_rng_state(state)
        else:
            torch.cuda.set_rng_state(state, device)


def modules_in(function: Any) -> list[nn.Module]:
    """Modules and submodules that a callable is, is a method of, or refers to."""
    modules = (module for root in _roots_in(function) for module in root.modules())
    return list(dict.fromkeys(modules))


def parameters_in(function: Any) -> dict[str, Tensor]:
    """The parameters of the modules of `modules_in`, by their names there."""
    if isinstance(function, nn.Module):
        return dict(function.named_parameters())
    roots = _roots_in(function)
    return {
        f"{type(root).__name__} {i}: {name}" if len(roots) > 1 else name: parameter
        for i, root in enumerate(roots)
        for name, parameter in root.named_parameters()
    }


def _roots_in(function: Any) -> list[nn.Module]:
    if isinstance(function, nn.Module):
        return [function]
    if isinstance(function, functools.partial):
        inside = [function.func, *function.args, *function.keywords.values()]
    elif inspect.ismethod(function):
        inside = [function.__self__]
    elif inspect.isfunction(function):
        scope = inspect.getclosurevars(function)
        values = (*scope.nonlocals.values(), *scope.globals.values())
        inside = [value for value in values if isinstance(value, nn.Module)]
    else:
        inside = []
    return list(dict.fromkeys(root for part in inside for root in _roots_in(part)))


def gradient_wrappers(modules: list[nn.Module]) -> list[nn.Module]:
    """The modules that reduce gradients over ranks: DDP's and FSDP2's."""
    wrappers: list[nn.Module] = []
    for module in modules:
        if isinstance(module, DistributedDataParallel):
            if module.static_graph:  # PyTorch's own no_sync ends in an internal assertion
                raise ValueError(
                    "encoders: DistributedDataParallel(static_graph=True) cannot hold back its "
                    "synchronisation; expected static_graph=False"
                )
            wrappers.append(module)
        elif hasattr(module, "set_requires_gradient_sync"):
            wrappers.append(module)
    return wrappers


@contextlib.contextmanager
def without_synchronisation(wrappers: list[nn.Module]) -> Iterator[None]:
    """Forward and backward passes inside leave the wrappers' gradients on their ranks."""
    with contextlib.ExitStack() as stack:
        for wrapper in wrappers:
            if isinstance(wrapper, DistributedDataParallel):
                stack.enter_context(wrapper.no_sync())
            else:
                fsdp: Any = wrapper
                stack.callback(fsdp.set_requires_gradient_sync, True, recurse=False)
                fsdp.set_requires_gradient_sync(False, recurse=False)
        yield


@contextlib.contextmanager
def keep_running_statistics(modules: list[nn.Module]) -> Iterator[None]:
    """Training-mode normalisation inside uses a batch's statistics, but does not record them."""
    with contextlib.ExitStack() as stack:
        for module in modules:
            if not (module.training and getattr(module, "track_running_stats", False)):
                continue
            if is_batch_norm(module):
                stack.callback(setattr, module, "track_running_stats", True)
                module.track_running_stats = False
            elif is_instance_norm(module):
                stack.callback(setattr, module, "momentum", module.momentum)
                module.momentum = 0.0
        yield
