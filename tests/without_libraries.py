"""Run commands in forks of one process, where some libraries are not installed.

Started as a program: reads a list of [libraries, words or a Python expression] as JSON. After a run
that names one of its libraries as missing this is there and the same runs again, as its user would,
until none is named. Writes a line for each: [library or null, exit code or the error's name, what
was printed] of all of these runs. A fork costs no import of torch.
"""

from __future__ import annotations

import contextlib
import gc
import io
import json
import os
import re
import sys
import traceback
import warnings
from typing import Any

# Once for all forks; no other library comes with them.
import torch
import torch.distributed.fsdp
import torch.nn.parallel
import torch.utils.data

from megabatch import cli
from megabatch.imports import DISTRIBUTIONS

Outcome = tuple[str | None, object, str]


class Hiding:
    """A finder for which libraries are not installed."""

    def __init__(self, finder: Any, libraries: list[str]) -> None:
        self.finder, self.libraries = finder, libraries

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        hidden = name.partition(".")[0] in self.libraries
        return None if hidden else self.finder.find_spec(name, path, target)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.finder, name)


def run(asked: list[str] | str) -> tuple[object, str]:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            if isinstance(asked, list):
                return cli.main(asked), printed.getvalue()
            exec(asked)
        except Exception as error:
            return type(error).__name__, f"{printed.getvalue()}{error}\n{traceback.format_exc()}"
    return 0, printed.getvalue()


def run_until_nothing_is_missing(libraries: list[str], asked: list[str] | str) -> list[Outcome]:
    loaded = {name: sys.modules.pop(name) for name in list(sys.modules) if top(name) in libraries}
    sys.meta_path[:] = [Hiding(finder, libraries) for finder in sys.meta_path]
    outcomes = []
    while True:
        code, text = run(asked)
        library = next((x for x in libraries if is_named(x, text)), None)
        outcomes.append((library, code, text))
        if library is None or libraries == [library]:
            return outcomes
        libraries.remove(library)
        sys.modules.update({n: module for n, module in loaded.items() if top(n) == library})


def is_named(library: str, text: str) -> bool:
    return bool(re.search(rf"\b{DISTRIBUTIONS.get(library, library)} is not installed", text))


def top(name: str) -> str:
    return name.partition(".")[0]


def in_a_fork(libraries: list[str], asked: list[str] | str) -> str:
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        with os.fdopen(writing, "w") as pipe:
            pipe.write(json.dumps(run_until_nothing_is_missing(libraries, asked)))
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        told = pipe.read()
    os.waitpid(child, 0)
    return told


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    gc.disable()  # forks end soon; collecting while they import takes a third of their time
    for case in json.load(sys.stdin):
        print(in_a_fork(*case), flush=True)
