"""Python programs in processes of their own that start with torch imported.

As `subprocess` does with `[sys.executable, *words]`, but forked from the server that checks of
several processes come from (tests/similarity/distributed/processes.py): importing torch and
megabatch takes a program seconds, which are most of what a short one takes.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch

from tests.similarity.distributed.processes import forked

ROOT = Path(__file__).parents[1]
_subprocess_run = subprocess.run


class Program:
    """One that runs in a session of its own; it ends with what started it, if not before."""

    def __init__(self, words: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        """`words` as after `python`: a file or -m module or -c code, and what that takes."""
        self._words = list(words)
        self._folder = tempfile.TemporaryDirectory()
        files = [Path(self._folder.name, name) for name in ("out", "err")]
        whole = dict(os.environ if environment is None else environment)
        self._out, self._err = files
        self._process = forked(_run, self._words, whole, files)
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Wait for its end; what it wrote to standard output and standard error.

        Raises:
            subprocess.TimeoutExpired: it did not end; it is killed, with all that it started.
        """
        self._process.join(timeout)
        if self._process.exitcode is None:
            os.killpg(self.pid, signal.SIGKILL)
            self._process.join()
            raise subprocess.TimeoutExpired(self._words, timeout or 0, *self.said())
        return self.said()

    def said(self) -> tuple[str, str]:
        """What it wrote so far."""
        out, err = (file.read_text() if file.exists() else "" for file in (self._out, self._err))
        return out, err


def run(
    words: Sequence[str], environment: Mapping[str, str] | None = None, timeout: float = 280
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end."""
    program = Program(words, environment)
    out, err = program.communicate(timeout)
    assert program.returncode is not None
    return subprocess.CompletedProcess(list(words), program.returncode, out, err)


def completed(
    command: Sequence[str], *, text: bool = False, **options: Any
) -> subprocess.CompletedProcess[Any]:
    """In place of `subprocess.run`: a Python program forks.

    Any other program runs as ever.
    """
    if command[0] != sys.executable:
        return _subprocess_run(command, text=text, **options)
    ended = run(command[1:])
    texts = (ended.stdout, ended.stderr)
    out, errors = texts if text else (one.encode() for one in texts)
    return subprocess.CompletedProcess(list(command), ended.returncode, out, errors)


def _run(words: list[str], environment: Mapping[str, str], files: Sequence[Path]) -> NoReturn:
    os.setsid()
    multiprocessing.set_start_method(None, force=True)  # of its own processes, as in any program
    os.environ.clear()
    os.environ.update(environment)
    for number, file in enumerate(files, 1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    torch.set_num_threads(int(environment.get("OMP_NUM_THREADS", torch.get_num_threads())))
    try:
        _execute(words)
        code = 0
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
        if code and not isinstance(leaving.code, int):
            print(leaving.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        code = 1
    _leave(code)


def _execute(words: list[str]) -> None:
    if words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        sys.path.insert(0, "")
        exec(compile(words[1], "<string>", "exec"), {"__name__": "__main__"})
    elif words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        sys.path.insert(0, str(Path(words[0]).parent))
        runpy.run_path(words[0], run_name="__main__")


def _leave(code: int) -> NoReturn:
    """As the interpreter ends: threads, then what libraries registered."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
