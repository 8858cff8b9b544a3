"""Python programs in processes of their own that start with torch imported.

As `subprocess` does with `[sys.executable, *words]`, but forked from the tests' server (server.py):
importing torch and megabatch takes a program seconds, which are most of what a short one takes.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch

from tests.server import forked, run_program

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
    for number, file in enumerate(files, 1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    torch.set_num_threads(int(environment.get("OMP_NUM_THREADS", torch.get_num_threads())))
    run_program(words, environment)
