"""Modules that most of the tests' processes need; the server that forks them imports this one."""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import sys
import warnings

from tests import interpreter

sys.modules["wandb"] = None  # type: ignore[assignment]  # as in tests/conftest.py
for name in (
    "torch.distributed.fsdp",
    "torch._dynamo",
    "megabatch.training.run",
    "matplotlib.pyplot",
    "open_clip",
    "sklearn.linear_model",
):
    with contextlib.suppress(ImportError):
        importlib.import_module(name)
del sys.modules["wandb"]

interpreter.mend()

# As in pyproject.toml for pytest's own process. A UserWarning of a program may be for its user.
for category in (DeprecationWarning, FutureWarning):
    warnings.filterwarnings("error", category=category, module="megabatch")

# Exempt these objects from collection, which would take each process a quarter of a second.
gc.collect()
gc.freeze()
atexit.register(gc.unfreeze)  # libraries warn of objects that outlive the interpreter
