"""Imported by the server that the tests' processes are forked from: what most of them import."""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib

from tests import interpreter

for name in (
    "torch.distributed.fsdp",
    "torch._dynamo",
    "megabatch.training.session",
    "matplotlib.pyplot",
    "open_clip",
    "sklearn.linear_model",
):
    with contextlib.suppress(ImportError):
        importlib.import_module(name)

interpreter.mend()

# It stays: to look through all of it takes each process a quarter of a second a time.
gc.collect()
gc.freeze()
atexit.register(gc.unfreeze)  # libraries remark on what outlives the interpreter
