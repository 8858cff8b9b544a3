"""The context of a forward pass: the settings besides its inputs that it depends on.

The second pass runs when `.backward()` is called: usually outside autocast, perhaps after a call of
`eval()`, or under another default dtype. It must compute the same function as the first pass.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import nn

from megabatch.torch_internals import parametrizations_not_cached

AUTOCAST_DEVICES = ("cpu", "cuda")


class ForwardContext:
    """Autocast, default dtype and device, precision of float32 products, modes, CUDA streams."""

    def __init__(self, modules: Iterable[nn.Module], devices: Iterable[torch.device]) -> None:
        """Save the current settings."""
        self._autocast = {device: _autocast(device) for device in AUTOCAST_DEVICES}
        self._autocast_cache = torch.is_autocast_cache_enabled()
        self._dtype = torch.get_default_dtype()
        self._device = _default_device()
        self._precision = _float32_precision()
        self._training = {module: module.training for module in modules}
        self._streams = [torch.cuda.current_stream(device) for device in devices]

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Restore the saved settings inside, and afterwards those of the caller."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(parametrizations_not_cached())
            for stream in self._streams:
                stack.enter_context(_on_stream(stream))
            for device, state in self._autocast.items():
                if state != _autocast(device):
                    enabled, dtype = state
                    cached = self._autocast_cache
                    stack.enter_context(torch.autocast(device, dtype, enabled, cached))
            if self._device != _default_device():
                stack.enter_context(self._device)
            if self._dtype != (dtype := torch.get_default_dtype()):
                stack.callback(torch.set_default_dtype, dtype)
                torch.set_default_dtype(self._dtype)
            precision = _float32_precision()
            if self._precision and precision and self._precision != precision:
                stack.callback(torch.set_float32_matmul_precision, precision)
                torch.set_float32_matmul_precision(self._precision)
            for module, training in self._training.items():
                if module.training != training:
                    stack.callback(setattr, module, "training", module.training)
                    module.training = training
            yield


def _default_device() -> torch.device:
    # torch.get_default_device() of PyTorch 2.9 raises after torch.set_default_device(None).
    return torch.empty(0).device


def _autocast(device: str) -> tuple[bool, torch.dtype]:
    return torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)


def _float32_precision() -> str:
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # set by the newer per-backend names, which PyTorch refuses to mix
        return ""


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
