"""The state that both passes must find: random numbers, settings, buffers, unchanged tensors."""

from __future__ import annotations

import contextlib
import math
import random
import sys
import warnings
from collections.abc import Iterable, Iterator
from typing import TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from megabatch.gradient_cache.outputs import Outputs
from megabatch.torch_internals import parametrizations_not_cached, version_of

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)

#: Elements up to which integers may be state. Larger ones are tables, or quantised weights.
INTEGERS = 1 << 16

#: A buffer by its module and its name, as another tensor may take its place.
Buffer: TypeAlias = "tuple[nn.Module, str]"

#: Training steps whose two passes are compared; weights that start at zero may hide a difference.
COMPARED = (1, 10, 100, 1000)
#: Relative difference in norm that features may have between the passes: rounding stays below it.
DIFFERENCE = 0.05

#: Names of buffers that forward passes change by `buffer.data`, which has a version of its own.
_uncounted: WeakKeyDictionary[nn.Module, set[str]] = WeakKeyDictionary()


def cuda_devices(tensors: Iterable[Tensor] = ()) -> set[torch.device]:
    """The CUDA devices of the tensors, and the current one if CUDA is initialised."""
    devices = {tensor.device for tensor in tensors if tensor.is_cuda}
    if torch.cuda.is_initialized():
        devices.add(torch.device("cuda", torch.cuda.current_device()))
    return devices


class ForwardContext:
    """The settings of a step's call, which the second pass needs again when `.backward()` runs.

    Autocast, default dtype and device, precision of float32 products, train or eval mode, streams.
    """

    def __init__(self, modules: Iterable[nn.Module], devices: Iterable[torch.device]) -> None:
        self._training = {module: module.training for module in modules}
        self._dtype = torch.get_default_dtype()
        # torch.get_default_device() of PyTorch 2.9 raises after torch.set_default_device(None).
        self._device = torch.empty(0).device
        self._autocast = {kind: _autocast(kind) for kind in ("cpu", "cuda")}
        self._cached = torch.is_autocast_cache_enabled()
        matmuls = (backend.matmul for backend in (torch.backends.cuda, torch.backends.mkldnn))
        self._precisions = {matmul: matmul.fp32_precision for matmul in matmuls}
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
                    stack.enter_context(torch.autocast(kind, *state, self._cached))
            if self._device != torch.empty(0).device:
                stack.enter_context(self._device)
            stack.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(self._dtype)
            for matmul, precision in self._precisions.items():
                stack.callback(setattr, matmul, "fp32_precision", matmul.fp32_precision)
                matmul.fp32_precision = precision
            for module, training in self._training.items():
                stack.callback(setattr, module, "training", module.training)
                module.training = training
            yield


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
        self.name, self.tensor = name, tensor  # the name is for messages
        self._version = version_of(tensor)
        plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
        # DeepSpeed, and DistributedDataParallel's own precision, move parameters.
        moved = hasattr(tensor, "ds_id") or hasattr(tensor, "_mp_param")
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

    The generators are PyTorch's on the CPU and CUDA devices, Python's and NumPy's. Running
    statistics are left out: in training mode they change no output.
    """

    def __init__(self, devices: Iterable[torch.device], buffers: Iterable[Buffer]) -> None:
        """Save it; at first `buffers` are those of `possible_state`."""
        self._cpu = torch.get_rng_state()
        self._cuda = {device: torch.cuda.get_rng_state(device) for device in devices}
        self._python = random.getstate()
        numpy = sys.modules.get("numpy.random")
        self._numpy = None if numpy is None else numpy.get_state(legacy=False)
        watched = {buffer: Watched(buffer[1], getattr(*buffer)) for buffer in buffers}
        self._saved = {b: (w, w.tensor.detach().clone()) for b, w in watched.items()}

    def keep_updated(self, *, compare: bool) -> list[Buffer]:
        """Forget the buffers that have not changed since, and return the others.

        `compare`: values as well as versions, which waits for a GPU; later steps remember the find.
        """
        kept = {}
        for (module, name), (before, value) in self._saved.items():
            changed = getattr(module, name) is not before.tensor or before.changed()
            if compare and not changed and not torch.equal(before.tensor, value):
                _uncounted.setdefault(module, set()).add(name)
            if changed or name in _uncounted.get(module, ()):
                kept[module, name] = before, value
        self._saved = kept
        return [*kept]

    def restore(self) -> None:
        """Make it the current state again."""
        torch.set_rng_state(self._cpu)
        for device, state in self._cuda.items():
            torch.cuda.set_rng_state(state, device)
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy.random"].set_state(self._numpy)
        self.restore_buffers()

    @torch.no_grad()
    def restore_buffers(self) -> None:
        """Undo changes of buffers, in place or by another tensor in their place."""
        for buffer, (watched, value) in self._saved.items():
            if getattr(*buffer) is not watched.tensor:
                setattr(*buffer, watched.tensor)
            watched.tensor.copy_(value)


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


class PassesCheck:
    """Compares features of both passes in a few steps, which wait for a GPU; warns once."""

    def __init__(self) -> None:
        self._warned = False

    def wanted(self, step: int) -> bool:
        """Whether to compare in this training step, the first of which is 1."""
        return step in COMPARED and not self._warned

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
