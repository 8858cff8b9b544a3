"""Modules of a user in the working directory of a test."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

WriteModule = Callable[[str, str], Path]

#: A module that leaves a file behind when it is imported, and has whatever is asked of it.
MALICIOUS = """
from pathlib import Path

Path(__file__).with_name("it-ran").touch()


def __getattr__(name):
    raise SystemExit("it ran")
"""


def writing_when_imported(path: Path) -> str:
    """The source of a module with a tokenizer and a configuration that leaves a file behind."""
    return f"""
from pathlib import Path

from transformers import PretrainedConfig, PreTrainedTokenizerFast

Path({str(path)!r}).touch()


class Tokenizer(PreTrainedTokenizerFast):
    pass


class Config(PretrainedConfig):
    model_type = "evil"
"""


@contextmanager
def user_modules(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WriteModule]:
    """Make `folder` the working directory, and forget its modules afterwards."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    before = set(sys.modules)

    def write(name: str, source: str) -> Path:
        path = folder / f"{name}.py"
        path.write_text(source)
        importlib.invalidate_caches()
        return path

    yield write
    for name in set(sys.modules) - before:
        if str(folder) in str(getattr(sys.modules[name], "__file__", None)):
            del sys.modules[name]
