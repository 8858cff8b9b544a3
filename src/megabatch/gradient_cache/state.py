"""The state that both passes must find: random numbers, settings, buffers, unchanged tensors.

Frozen parts of a model (LiT) run in the first pass alone; the second reuses their outputs.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import random
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from megabatch.gradient_cache.autograd import is_from_torch
from megabatch.torch_internals import (
    forward_hooks,
    is_compiled,
    parametrizations_not_cached,
    uncompiled,
    version_of,
)

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)

#: Elements up to which integers may be state. Larger ones are tables, or quantised weights.
INTEGERS = 1 << 16

#: A buffer by its module and its name, as another tensor may take its place.
Buffer: TypeAlias = "tuple[nn.Module, str]"

#: A part's calls in one micro-batch: a copy of each output with the random state after the call, or
#: None if it cannot be reused.
Calls: TypeAlias = "list[tuple[Tensor, RandomState] | None]"

#: Names of buffers that forward passes change by `buffer.data`, which has a version of its own.
_uncounted: WeakKeyDictionary[nn.Module, set[str]] = WeakKeyDictionary()


def cuda_devices(tensors: Iterable[Tensor] = ()) -> set[torch.device]:
    """The CUDA devices of the tensors, and the current one if CUDA is initialised."""
    devices = {tensor.device for tensor in tensors if tensor.is_cuda}
    if torch.cuda.is_initialized():
        devices.add(torch.device("cuda", torch.cuda.current_device()))
    return devices


class RandomState:
    """The state of PyTorch's generators on the CPU and CUDA devices, of Python's and NumPy's."""

    def __init__(self, devices: Iterable[torch.device]) -> None:
        """Save the current state."""
        self._cpu = torch.get_rng_state()
        self._cuda = {device: torch.cuda.get_rng_state(device) for device in devices}
        self._python = random.getstate()
        numpy = sys.modules.get("numpy.random")
        self._numpy = None if numpy is None else numpy.get_state(legacy=False)

    def restore(self) -> None:
        """Make it the current state again."""
        torch.set_rng_state(self._cpu)
        for device, state in self._cuda.items():
            torch.cuda.set_rng_state(state, device)
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy.random"].set_state(self._numpy)


class ForwardContext:
    """The settings of a step's call, which the second pass needs again when `.backward()` runs.

    Autocast, default dtype and device, precision of float32 products, train or eval mode, streams.
    """

    def __init__(self, modules: Iterable[nn.Module], devices: Iterable[torch.device]) -> None:
        """Save the current settings."""
        self._training = {module: module.training for module in modules}
        self._dtype, self._precision = torch.get_default_dtype(), _precision()
        # torch.get_default_device() of PyTorch 2.9 raises after torch.set_default_device(None).
        self._device = torch.empty(0).device
        self._autocast = {kind: _autocast(kind) for kind in ("cpu", "cuda")}
        self._cache_enabled = torch.is_autocast_cache_enabled()
        self._streams = [torch.cuda.current_stream(device) for device in devices]

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Restore the saved settings inside, and afterwards those of the caller."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(parametrizations_not_cached())
            for stream in self._streams:
                stack.enter_context(_on_stream(stream))
            for kind, state in self._autocast.items():
                if state != _autocast(kind):
                    stack.enter_context(torch.autocast(kind, *state, self._cache_enabled))
            if self._device != torch.empty(0).device:
                stack.enter_context(self._device)
            stack.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(self._dtype)
            current = _precision()
            if self._precision and current and self._precision != current:
                stack.callback(torch.set_float32_matmul_precision, current)
                torch.set_float32_matmul_precision(self._precision)
            for module, training in self._training.items():
                stack.callback(setattr, module, "training", module.training)
                module.training = training
            yield


def _precision() -> str:
    """The precision of float32 products; "" if it was set by torch's newer per-backend names.

    Then it cannot be read, nor set by the older ones.
    """
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return ""


def _autocast(device: str) -> tuple[torch.dtype, bool]:
    return torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)


@contextlib.contextmanager
def _on_stream(stream: torch.cuda.Stream) -> Iterator[None]:
    """Run on this stream, after the current stream's earlier work and before its later work."""
    current = torch.cuda.current_stream(stream.device)
    if stream == current:
        yield
        return
    stream.wait_stream(current)
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        current.wait_stream(stream)


@contextlib.contextmanager
def keep_running_statistics(modules: Iterable[nn.Module]) -> Iterator[None]:
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


class Watched:
    """A tensor with its version, and with its memory, which `tensor.data = ...` replaces."""

    def __init__(self, name: str, tensor: Tensor) -> None:
        """Save them; the name is for messages."""
        self.name = name
        self.tensor = tensor
        self._version = version_of(tensor)
        plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
        # FSDP1, DeepSpeed, and DistributedDataParallel's own precision move parameters.
        moved = any(hasattr(tensor, name) for name in ("_fsdp_flattened", "ds_id", "_mp_param"))
        # As the old memory is held, the new one cannot have its address.
        self._memory = tensor.detach() if plain and not moved and not tensor.is_meta else None

    def changed(self) -> bool:
        """Whether it was changed since; other memory with the same values is no change."""
        if version_of(self.tensor) != self._version:
            return True
        before, now = self._memory, self.tensor.detach()
        if before is None or before.data_ptr() == now.data_ptr() or before.shape != now.shape:
            return False
        return not torch.equal(before.to(now), now)


class ForwardState:
    """The state that an encoder's forward passes change: random numbers, and buffers.

    Running statistics are left out: in training mode they change no output.
    """

    def __init__(self, devices: Iterable[torch.device], buffers: Iterable[Buffer]) -> None:
        """Save it; at first `buffers` are those of `possible_state`."""
        self._random = RandomState(devices)
        watched = {buffer: Watched(buffer[1], getattr(*buffer)) for buffer in buffers}
        self._saved = {b: (w, w.tensor.detach().clone()) for b, w in watched.items()}

    def keep_updated(self, *, compare: bool) -> list[Buffer]:
        """Forget the buffers that have not changed since, and return the others.

        `compare`: values as well as versions, which waits for a GPU; later steps remember the find.
        """
        for (module, name), (watched, value) in self._saved.items() if compare else ():
            if not watched.changed() and not torch.equal(watched.tensor, value):
                _uncounted.setdefault(module, set()).add(name)
        self._saved = {b: saved for b, saved in self._saved.items() if _updated(b, saved[0])}
        return [*self._saved]

    def restore(self) -> None:
        """Make it the current state again."""
        self._random.restore()
        self.restore_buffers()

    @torch.no_grad()
    def restore_buffers(self) -> None:
        """Undo changes of buffers, in place or by another tensor in their place."""
        for buffer, (watched, value) in self._saved.items():
            if getattr(*buffer) is not watched.tensor:
                setattr(*buffer, watched.tensor)
            watched.tensor.copy_(value)


def _updated(buffer: Buffer, before: Watched) -> bool:
    """Whether a buffer was changed in place since, or another tensor is in its place."""
    module, name = buffer
    replaced = getattr(module, name) is not before.tensor
    return replaced or name in _uncounted.get(module, ()) or before.changed()


def possible_state(modules: Iterable[nn.Module]) -> list[Buffer]:
    """The buffers that forward passes may update; one of them shows which they do."""
    return [
        (module, name)
        for module in modules
        if not isinstance(module, BATCH_NORMS + INSTANCE_NORMS)
        for name, buffer in module.named_buffers(recurse=False)
        if buffer.layout is torch.strided  # others cannot be compared
        and not buffer.is_inference()  # does not count changes
        if buffer.is_floating_point() or buffer.numel() <= INTEGERS
    ]


class FrozenParts:
    """The largest frozen modules, inside trained ones, that return a vector per sample.

    During a pass each has another `forward`, set on the instance: in the first pass it records the
    part's outputs, in the second it returns them. The module stays in place, so code of the model
    sees no change.

    Other outputs than features, (rows, width), may be as large as activations. A part is run again
    if skipping it could make a difference: its output depends on something trained; its forward
    sets attributes, which the model may read; one of its modules has a hook; or the number of its
    calls differs between micro-batches.
    """

    def __init__(self, modules: list[nn.Module], devices: Iterable[torch.device]) -> None:
        """Find them; `devices`: of the random numbers that they may draw."""
        self._devices = set(devices)
        self._parts = _largest_frozen(modules)
        self._recorded: list[dict[nn.Module, Calls]] = []  # for each micro-batch

    def __bool__(self) -> bool:
        """Whether there is any."""
        return bool(self._parts)

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """Record the parts' outputs for the next micro-batch, which is encoded inside.

        The first one needs a graph, which shows the parts that are constant.
        """
        first = not self._recorded  # a forward pass sets attributes in all micro-batches or in none
        before = {part: _attributes(part) for part in self._parts if first}
        calls: dict[nn.Module, Calls] = {part: [] for part in self._parts}
        self._recorded.append(calls)
        with contextlib.ExitStack() as stack:
            for part in self._parts:
                stack.enter_context(_replaced(part, self._record, calls[part]))
            yield
        changed = {part for part in before if not _same(before[part], _attributes(part))}
        self._parts = [
            part
            for part, found in calls.items()
            if None not in found and len(found) == len(self._recorded[0][part])
            if part not in changed
        ]

    @contextlib.contextmanager
    def replayed(self, micro_batch: int) -> Iterator[None]:
        """Return each recorded output of a micro-batch, once, instead of running the parts."""
        with contextlib.ExitStack() as stack:
            for part in self._parts if self._recorded else ():
                stack.enter_context(_replaced(part, _replay, self._recorded[micro_batch][part]))
            yield

    def _record(self, calls: Calls, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        features = isinstance(output, Tensor) and output.ndim == 2 and not output.requires_grad
        # Copied, as the model may change it in place, and as it may be a view of activations.
        calls.append((output.clone(), RandomState(self._devices)) if features else None)
        return output


def _replay(calls: Calls, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    call = calls.pop(0) if calls else None
    if call is None:
        return forward(*args, **kwargs)
    output, random_state = call
    random_state.restore()  # as after the part's own random numbers
    return output


@contextlib.contextmanager
def _replaced(part: nn.Module, function: Callable[..., Any], calls: Calls) -> Iterator[None]:
    """Let this thread's calls of the part be `function(calls, forward, *args, **kwargs)` inside."""
    forward, thread, own = part.forward, threading.get_ident(), vars(part)

    @functools.wraps(forward)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != thread:
            return forward(*args, **kwargs)
        return function(calls, forward, *args, **kwargs)

    before = {"forward": own["forward"]} if "forward" in own else {}
    own["forward"] = replacement  # not by setattr, which wrappers pass on to the module inside
    try:
        yield
    finally:
        del own["forward"]
        own.update(before)


def _largest_frozen(modules: list[nn.Module]) -> list[nn.Module]:
    """Frozen children of other modules, except those whose `forward` may not be called."""
    # They run in another form: compiled, perhaps with their parent, or as copies in threads.
    roots = (uncompiled(m) for m in modules if is_compiled(m) or isinstance(m, nn.DataParallel))
    other = {inner for root in roots for inner in root.modules()}
    required = {m: {parameter.requires_grad for parameter in m.parameters()} for m in modules}
    parents = (m for m in modules if m not in other and required[m] != {False})
    children = dict.fromkeys(child for parent in parents for child in parent.children())
    frozen = [m for m in children if m not in other and required[m] == {False}]
    hooks = {part: [hook for m in part.modules() for hook in forward_hooks(m)] for part in frozen}
    return [part for part in frozen if all(map(is_from_torch, hooks[part]))]


def _attributes(part: nn.Module) -> list[Any]:
    """All that the modules of a part refer to, and the members of containers.

    Parameters are left out: FSDP2 exchanges them during a forward pass.
    """
    found: list[Any] = []
    for module in part.modules():
        for value in (value for name, value in vars(module).items() if name != "_parameters"):
            members = value.values() if isinstance(value, dict) else value
            found += [value, *(members if isinstance(value, (dict, list, tuple, set)) else ())]
    return found


def _same(before: list[Any], after: list[Any]) -> bool:
    return len(before) == len(after) and all(map(operator.is_, before, after))
