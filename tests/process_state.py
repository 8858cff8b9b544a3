"""The settings of this process, which a test may change for a while but not leave changed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megabatch import similarity
from megabatch.similarity import settings

#: Variables that pytest sets, and libraries when they are imported or first used.
OWN = (
    *("PYTEST_", "PYTORCH_", "TORCHINDUCTOR_", "_TORCHINDUCTOR_", "TRITON_", "TOKENIZERS_"),
    *("KMP_", "KINETO_", "TF_", "CUDA_"),
)


def _set_default_device(device: Any) -> None:
    """None and not "cpu", which would leave a mode that sees every function's call."""
    torch.set_default_device(None if torch.device(device).type == "cpu" else device)
    context = torch._GLOBAL_DEVICE_CONTEXT  # type: ignore[attr-defined]
    if getattr(context, "device_context", ...) is None:  # for `get_default_device` of torch 2.9
        del context.device_context


def _of_ours(setter: Callable[[Any], Any]) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    """Getter and setter of one of our settings, whose function returns the value before."""

    def get() -> Any:
        before = setter(None)
        setter(before)
        return before

    return get, setter


#: Name -> functions that read and set it.
SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    # As torch.get_default_device(), which 2.9 has with a bug.
    "default device": (lambda: torch.empty(0).device, _set_default_device),
    "threads": (torch.get_num_threads, torch.set_num_threads),
    "deterministic": (
        torch.are_deterministic_algorithms_enabled,
        torch.use_deterministic_algorithms,
    ),
    "precision": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "gradients": (torch.is_grad_enabled, torch.set_grad_enabled),
    "workspace": _of_ours(similarity.set_workspace),
    "gather": _of_ours(settings.set_gather),
    "grid": _of_ours(settings.set_grid),
    "folder": (os.getcwd, os.chdir),
}


@contextmanager
def changed(name: str, value: Any) -> Iterator[None]:
    """A context within which a setting has this value."""
    get, set_to = SETTINGS[name]
    before = get()
    set_to(value)
    try:
        yield
    finally:
        set_to(before)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """For conftests to import: sums over threads are rounded differently with other numbers."""
    with changed("threads", 1):
        yield


def now() -> dict[str, Any]:
    """All settings, whether torch.distributed is initialised, and the environment's variables."""
    found = {name: get() for name, (get, _) in SETTINGS.items()}
    found["group"] = dist.is_available() and dist.is_initialized()
    return found | _variables()


def differences(before: dict[str, Any]) -> dict[str, Any]:
    """The states that have changed: by name, the value before and the value now."""
    after = now()
    pairs = {name: (before.get(name), after.get(name)) for name in before.keys() | after.keys()}
    return {name: (old, new) for name, (old, new) in pairs.items() if old != new}


def restore(before: dict[str, Any]) -> None:
    """Set all that can be set, for the tests to come."""
    for name, (old, _) in differences(before).items():
        if name in SETTINGS:
            SETTINGS[name][1](old)
        elif name != "group" and old is None:
            del os.environ[name]
        elif name != "group":
            os.environ[name] = old


def _variables() -> dict[str, str]:
    return {name: text for name, text in os.environ.items() if not name.startswith(OWN)}
