"""Forked programs behave as `python` does."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.programs import Program, run
from tests.training.runs import is_there

WORDS = """
import atexit, sys
atexit.register(print, "at exit")
print(__name__, sys.argv[1:])
print("told", file=sys.stderr)
"""


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("", 0),
        ("sys.exit(7)", 7),
        ("sys.exit('no such file')", 1),
        ("raise KeyError('missing')", 1),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -9),
    ],
)
def test_it_ends_as_python_does(tmp_path: Path, end: str, code: int) -> None:
    (tmp_path / "program.py").write_text(WORDS + end)
    words = ["-c", WORDS] if not end else [str(tmp_path / "program.py")]
    found = run([*words, "--one", "two"])
    assert found.returncode == code
    if code != -9:  # which writes nothing that is left
        assert found.stdout == "__main__ ['--one', 'two']\nat exit\n"
        expected = subprocess.run([sys.executable, *words], capture_output=True, text=True)
        assert (found.returncode, last(found.stderr)) == (code, last(expected.stderr))


def last(text: str) -> str:
    return text.strip().splitlines()[-1]


def test_its_own_processes_are_of_its_group_and_started_as_in_any_program() -> None:
    code = (
        "import multiprocessing as m, os; print(m.get_start_method(), os.getpgid(0) == os.getpid())"
    )
    expected = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
    assert run(["-c", code]).stdout.split() == [expected.split()[0], "True"]


def test_one_that_hangs_is_killed_with_what_it_started() -> None:
    code = "import os, time\nprint(os.fork(), flush=True)\ntime.sleep(600)"
    program = Program(["-c", code])
    while not program.said()[0]:
        assert program.poll() is None
        time.sleep(0.01)
    with pytest.raises(subprocess.TimeoutExpired):
        program.communicate(0.1)
    assert program.returncode == -9
    while is_there(program.pid):  # until the system has taken the other one away
        time.sleep(0.01)
