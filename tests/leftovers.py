"""The settings of a process that a test could leave changed behind it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist

from megabatch import similarity
from megabatch.similarity import settings

#: Variables that pytest sets, and libraries when they are imported or first used.
OWN = (
    "PYTEST_",
    "PYTORCH_",
    "TORCHINDUCTOR_",
    "TRITON_",
    "TOKENIZERS_",
    "KMP_",
    "KINETO_",
    "TF_",
    "CUDA_",
)


@dataclass(frozen=True)
class State:
    """Settings of this process."""

    default_dtype: torch.dtype
    default_device: torch.device
    threads: int
    deterministic: bool
    precision: str
    gradients: bool
    group: bool  #: whether torch.distributed is initialised
    workspace: int | None
    gather: int
    folder: str
    variables: dict[str, str]

    @classmethod
    def now(cls) -> State:
        """As it is."""
        bounds = similarity.set_workspace, settings.set_gather
        return cls(
            torch.get_default_dtype(),
            torch.empty(0).device,  # as torch.get_default_device(), which 2.9 has with a bug
            torch.get_num_threads(),
            torch.are_deterministic_algorithms_enabled(),
            torch.get_float32_matmul_precision(),
            torch.is_grad_enabled(),
            dist.is_available() and dist.is_initialized(),
            *map(_set_and_back, bounds),
            os.getcwd(),
            {name: text for name, text in os.environ.items() if not name.startswith(OWN)},
        )

    def differences(self, before: State) -> dict[str, Any]:
        """What was otherwise before: by name what it was, and what it is."""
        names = [field.name for field in fields(self)]
        pairs = {name: (getattr(before, name), getattr(self, name)) for name in names}
        olds, news = pairs.pop("variables")
        pairs |= {name: (olds.get(name), news.get(name)) for name in olds.keys() | news.keys()}
        return {name: (old, new) for name, (old, new) in pairs.items() if old != new}

    def restore(self) -> None:
        """Set all that can be set, for the tests to come."""
        torch.set_default_dtype(self.default_dtype)
        torch.set_num_threads(self.threads)
        torch.use_deterministic_algorithms(self.deterministic)
        torch.set_float32_matmul_precision(self.precision)
        torch.set_grad_enabled(self.gradients)
        similarity.set_workspace(self.workspace)
        settings.set_gather(self.gather)
        if torch.empty(0).device != self.default_device:
            # None and not "cpu", which would leave a mode that sees every function's call.
            on_cpu = self.default_device.type == "cpu"
            set_default_device(None if on_cpu else self.default_device)
        os.chdir(self.folder)
        for name in os.environ.keys() - self.variables.keys():
            if not name.startswith(OWN):
                del os.environ[name]
        os.environ.update(self.variables)


def _set_and_back(setting: Callable[[int | None], int | None]) -> int | None:
    before = setting(None)
    setting(before)
    return before


def set_default_device(device: torch.device | str | None) -> None:
    """Call torch's function; then `get_default_device` works on torch 2.9 after None, too."""
    torch.set_default_device(device)
    context = torch._GLOBAL_DEVICE_CONTEXT  # type: ignore[attr-defined]
    if getattr(context, "device_context", ...) is None:
        del context.device_context
