"""Which tests have threads, processes, clocks or memory in them, and so could fail by chance."""

from __future__ import annotations

import functools
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]

#: What such tests import or name, in their own file or in one of the tests that it imports.
SIGNS = re.compile(
    r"^\s*(?:import|from) (?:concurrent|gc|multiprocessing|psutil|resource|signal|socket|subprocess"
    r"|threading|time|torch\.multiprocessing|tracemalloc|weakref)\b"
    r"|\bworkers\b|peak|extra_bytes|StorageWeakRef",
    re.MULTILINE,
)
_IMPORTS = re.compile(r"^\s*from (tests[\w.]*) import (\w+)", re.MULTILINE)


@functools.cache
def is_concurrent(path: Path) -> bool:
    """Whether the tests of this file carry the marker `concurrency`."""
    return any(SIGNS.search(_text(file)) for file in _with_imports(path))


def _with_imports(path: Path) -> set[Path]:
    """This file and those of the tests that it imports, directly or not."""
    found, new = set(), [path]
    while new:
        file = new.pop()
        if file in found:
            continue
        found.add(file)
        for module, name in _IMPORTS.findall(_text(file)):
            base = ROOT.joinpath(*module.split("."))
            candidates = base.with_suffix(".py"), base / f"{name}.py"
            new += [candidate for candidate in candidates if candidate.exists()]
    return found


@functools.cache
def _text(path: Path) -> str:
    return path.read_text()
