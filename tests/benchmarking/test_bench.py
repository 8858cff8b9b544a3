"""Contenders side by side, each in a process of its own, and the table of their records."""

from __future__ import annotations

import dataclasses
import signal
import subprocess
import sys

import pytest
from rich.console import Console

from megabatch.benchmarking import bench, records
from megabatch.benchmarking.contenders import CLIP
from megabatch.benchmarking.inputs import Case
from megabatch.benchmarking.measure import Effort, Result
from tests import programs

EFFORT = Effort(seconds=0.0, repetitions=1, product_size=8, check_batch_size=8, max_memory=None)


def plan(rounds: int = 2, batch_sizes: tuple[int, ...] = (100, 200)) -> bench.Plan:
    return bench.Plan(
        loss=CLIP,
        contenders=CLIP.choose(("dense", "megabatch"), "cpu"),
        batch_sizes=batch_sizes,
        width=10,
        dtype="float32",
        device="cpu",
        scale=14.3,
        rounds=rounds,
        effort=EFFORT,
    )


def test_contenders_take_turns_and_sizes_follow_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    order: list[tuple[int, str]] = []

    def start(case: Case, effort: Effort) -> Result:
        assert effort is EFFORT
        order.append((case.b, case.contender))
        return Result("ok", "", (float(len(order)),), (1e9, 3e9), 10 * len(order), 0.1, 0.1, 0.1)

    starts: list[str] = []
    ends: list[str] = []
    monkeypatch.setattr(bench, "in_process", start)
    first, second = bench.run(plan(), starts.append, ends.append)
    assert order[:4] == [(100, n) for n in ("dense", "megabatch") * 2]
    assert order[4:] == [(200, n) for n in ("dense", "megabatch") * 2]
    assert len(starts) == len(ends) == 8
    assert starts[1] == "megabatch, b = 100, round 1 of 2"
    assert ends[1].startswith("megabatch, b = 100, round 1 of 2: 2.0 ms a call, measured in ")
    assert [(r.contender, r.b, r.ms) for r in first] == [("dense", 100, 2), ("megabatch", 100, 3)]
    assert first[0].extra_bytes == 30
    assert second[1].times_ms == (6.0, 8.0)


def test_out_of_memory_is_not_tried_again_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    order: list[str] = []

    def start(case: Case, effort: Effort) -> Result:
        order.append(case.contender)
        if case.contender == "dense":
            return Result("out of memory", "tried to allocate 9 bytes")
        return Result("ok", "", (1.0,), (1e9, 1e9), 10, 0.1, 0.1, 0.1)

    monkeypatch.setattr(bench, "in_process", start)
    ends: list[str] = []
    ((dense, mine),) = bench.run(plan(batch_sizes=(100,)), lambda _: None, ends.append)
    assert ends[0].startswith("dense, b = 100, round 1 of 2: out of memory, measured in ")
    assert order == ["dense", "megabatch", "megabatch"]
    assert (dense.status, dense.note, dense.ms) == (
        "out of memory",
        "tried to allocate 9 bytes",
        None,
    )
    assert mine.status == "ok"


linux = pytest.mark.skipif(sys.platform != "linux", reason="the CPU is measured on Linux only")
MIB = 2**20


@pytest.fixture
def _forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes start with torch imported; in test_command.py one starts as it does for users."""
    monkeypatch.setattr(subprocess, "run", programs.completed)


def alone(contender: str, max_memory: int | None = None) -> Result:
    effort = Effort(
        seconds=0.0, repetitions=1, product_size=64, check_batch_size=128, max_memory=max_memory
    )
    return bench.in_process(
        Case("clip", contender, "cpu", "float32", b=4096, d=32, scale=14.3), effort
    )


@linux
@pytest.mark.usefixtures("_forked")
def test_dense_takes_its_matrices_and_megabatch_does_not() -> None:
    dense, mine = alone("dense"), alone("megabatch")
    assert (dense.status, mine.status) == ("ok", "ok")
    assert dense.extra_bytes is not None
    assert mine.extra_bytes is not None
    assert dense.extra_bytes > 3 * 64 * MIB  # logits of 4,096 x 4,096 and two softmaxes
    assert mine.extra_bytes < 96 * MIB  # the logits once: they fit the workspace and are kept


@linux
@pytest.mark.usefixtures("_forked")
def test_too_little_memory_is_a_result() -> None:
    result = alone("dense", max_memory=60 * MIB)
    assert result.status == "out of memory"
    assert "67108864 bytes" in result.note
    assert not result.times_ms


@linux
@pytest.mark.usefixtures("_forked")
def test_a_process_that_fails_is_a_result() -> None:
    result = alone("unheard-of")
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
    result = alone("megabatch")
    assert (result.status, result.note) == (status, note)


def record(contender: str, b: int, ms: float, extra: int) -> records.Record:
    case = Case("clip", contender, "cpu", "float32", b=b, d=100, scale=14.3)
    return records.combine(
        case, [Result("ok", "", (ms,), (1e12, 1e12), extra, 1e-6, 0.1, 0.1)], work=8
    )


def lines(*made: records.Record) -> list[str]:
    console = Console(width=80, color_system=None)
    with console.capture() as capture:
        console.print(bench.table(made))
    return [" ".join(line.split()) for line in capture.get().splitlines()[2:]]


def test_beside_the_first_of_the_same_size() -> None:
    shown = lines(
        record("megabatch", 1000, 10.0, 1 << 20),
        record("dense", 1000, 25.0, 9 << 20),
        record("dense", 2000, 1100.0, 3 << 30),
    )
    assert shown[0] == "1,000 megabatch 10.0 1.0 8% 1.0 MiB 1.0 1.0e-06"
    assert shown[1] == "1,000 dense 25.0 2.5 3% 9.0 MiB 9.0 1.0e-06"
    assert shown[2] == "2,000 dense 1,100.0 1.0 0% 3.00 GiB 1.0 1.0e-06"


def test_the_widest_rows_fit_into_80_columns() -> None:
    made = [record(name, 1 << 20, 123_456.7, 1100 << 20) for name in CLIP.contenders]
    made.append(record("megabatch", 1 << 20, 0.1, 999 << 20))
    console = Console(width=80, color_system=None)
    with console.capture() as capture:
        console.print(bench.table(made))
    shown = capture.get()
    assert "…" not in shown
    assert len(shown.splitlines()) == len(made) + 2
    for one in made:
        assert f"{one.contender} " in shown
    assert shown.count("1,048,576") == len(made)
    assert "123,456.7" in shown
    assert "999.0 MiB" in shown


def test_what_has_no_figures_says_why() -> None:
    ok = record("dense", 1000, 25.0, 9 << 20)
    gone = dataclasses.replace(
        ok, contender="megabatch", status="out of memory", ms=None, extra_bytes=None
    )
    shown = lines(gone, ok, dataclasses.replace(ok, status="wrong"))
    assert shown[0] == "1,000 megabatch out of memory"
    assert shown[1] == "1,000 dense 25.0 3% 9.0 MiB 1.0e-06"
    assert shown[2].endswith("MiB wrong")


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0.0 MiB"), (3 << 19, "1.5 MiB"), (5 << 30, "5.00 GiB")]
)
def test_size(value: int, text: str) -> None:
    assert bench.size(value) == text
