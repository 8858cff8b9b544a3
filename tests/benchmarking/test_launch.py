from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from megabatch.benchmarking import launch
from megabatch.benchmarking.inputs import Case
from megabatch.benchmarking.measure import Effort

linux = pytest.mark.skipif(sys.platform != "linux", reason="the CPU is measured on Linux only")
MIB = 2**20


def run(contender: str, max_memory: int | None = None) -> launch.Result:
    effort = Effort(
        seconds=0.0, repetitions=2, product_size=64, check_batch_size=128, max_memory=max_memory
    )
    return launch.run(Case("clip", contender, "cpu", "float32", b=4096, d=32, scale=14.3), effort)


@linux
def test_dense_takes_its_matrices_and_megabatch_does_not() -> None:
    dense, mine = run("dense"), run("megabatch")
    assert (dense.status, mine.status) == ("ok", "ok")
    assert dense.extra_bytes is not None
    assert mine.extra_bytes is not None
    assert dense.extra_bytes > 3 * 64 * MIB  # logits of 4,096 x 4,096 and two softmaxes
    assert mine.extra_bytes < 96 * MIB  # the logits once: they fit the workspace and are kept


@linux
def test_too_little_memory_is_a_result() -> None:
    result = run("dense", max_memory=60 * MIB)
    assert result.status == "out of memory"
    assert "67108864 bytes" in result.note
    assert not result.times_ms


@linux
def test_a_process_that_fails_is_a_result() -> None:
    result = run("unheard-of")
    assert (result.status, result.note) == ("failed", "KeyError: 'unheard-of'")


@pytest.mark.parametrize(
    ("code", "status", "note"),
    [
        (-signal.SIGKILL, "out of memory", "the operating system ended the process"),
        (-signal.SIGSEGV, "failed", "exit code -11"),
    ],
)
def test_a_process_that_is_killed_is_a_result(
    code: int, status: str, note: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = subprocess.CompletedProcess([], code, b"", b"")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: ended)
    result = run("megabatch")
    assert (result.status, result.note) == (status, note)
