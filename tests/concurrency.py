"""Which tests may have threads, processes, clocks or memory in them, and so could fail by chance.

Checks of several processes (`on_processes`) are marked where they are defined; of the other tests
those whose file, or a file of helpers that it imports, uses one of these modules or arguments.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
MODULES = "gc multiprocessing psutil resource signal socket threading time tracemalloc weakref"
#: Arguments, and the class of programs that run beside the test.
WORDS = "extra_bytes max_memory workers Program"
SIGNS = re.compile(
    rf"^\s*(from|import) ({'|'.join(MODULES.split())})\b|\b({'|'.join(WORDS.split())})\b", re.M
)
#: Files of helpers: those of tests and of checks of processes are marked by themselves.
IMPORTED = re.compile(r"^from (tests[\w.]*)\.(?!test_|processes\b)(\w+) import", re.M)


@functools.cache
def uses_concurrency(path: Path) -> bool:
    """Whether a test file or one of its helpers uses concurrency."""
    text = path.read_text() if path.exists() else ""
    helpers = (
        ROOT / package.replace(".", "/") / f"{name}.py" for package, name in IMPORTED.findall(text)
    )
    return bool(SIGNS.search(text)) or any(map(uses_concurrency, helpers))
