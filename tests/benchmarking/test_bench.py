"""`megabatch bench loss`: the command, one measurement, and the table."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

from megabatch import cli
from megabatch.benchmarking import bench, clock, measure, records
from megabatch.benchmarking.bench import LossOptions
from megabatch.benchmarking.measure import SANE, Record, dense_clip_loss
from tests import programs

if sys.platform != "linux":
    pytest.skip("the CPU is measured on Linux only", allow_module_level=True)

MIB = 2**20
TINY = ["--device=cpu", "--width=8", "--seconds=0.01", "--rounds=2"]
OK = Record("dense", "cpu", "float32", 100, 10, 14.3, ms=2.0, extra_bytes=10, product_tflops=1.0)
OK = replace(OK, max_row_error=0.1, loss_error=0.1, scale_gradient_error=0.1, times_ms=(2.0,))


def answer(monkeypatch: pytest.MonkeyPatch, *bad: Record) -> list[tuple[str, int]]:
    """Measurements end at once with these results, or are right; returns their cases."""
    seen: list[tuple[str, int]] = []
    results = {one.contender: one for one in bad}

    def start(case: Record, options: LossOptions) -> Record:
        seen.append((case.contender, case.b))
        found = results.get(case.contender, OK)
        return replace(found, contender=case.contender, b=case.b)

    monkeypatch.setattr(bench, "in_process", start)
    return seen


# --- the command ----------------------------------------------------------------------------------


def test_measures_prints_and_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "new" / "r.json"
    words = ["--batch-size", "64", "--contenders", "megabatch", *TINY[:3], "--rounds=1"]
    assert bench.main([*words, "--output", str(output)]) == 0
    shown, progress = capsys.readouterr()
    assert "clip loss, forward + backward, d = 8, float32" in shown
    assert progress.startswith("megabatch, b = 64, round 1 of 1: ")
    assert progress.count("\n") == 1
    content = json.loads(output.read_text())
    assert content["command"].startswith("megabatch bench loss --batch-size 64 --contenders")
    (record,) = content["records"]
    assert (record["contender"], record["b"], record["status"]) == ("megabatch", 64, "ok")
    wanted = "device n_devices dtype d ms fraction extra_bytes max_row_error"
    assert set(wanted.split()) <= set(record)


def test_contenders_take_turns_and_a_failed_one_is_not_tried_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for status, code in (("wrong", 1), ("failed", 1), ("out of memory", 0)):
        gone = replace(OK, contender="megabatch", status=status, note="9 bytes", ms=None)
        seen = answer(monkeypatch, gone)
        assert bench.main(["--batch-size", "100", "200", *TINY]) == code
    one = [("megabatch", 100), ("dense", 100), ("openclip", 100)]
    assert seen[:5] == [*one, *one[1:]]
    assert seen[5:8] == [(name, 200) for name, _ in one]
    shown, progress = capsys.readouterr()
    assert "megabatch, b = 100: out of memory: 9 bytes" in shown
    assert "dense, b = 100, round 2 of 2: 2.0 ms a call, measured in 0 s" in progress


def test_records_of_the_sizes_done_survive_an_interrupt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(case: Record, options: LossOptions) -> Record:
        if case.b == 128:
            raise KeyboardInterrupt
        return replace(OK, b=case.b)

    monkeypatch.setattr(bench, "in_process", start)
    output = tmp_path / "r.json"
    words = ["--batch-size", "64", "128", "--contenders", "dense", "--output", str(output)]
    with pytest.raises(KeyboardInterrupt):
        bench.main([*words, *TINY])
    assert [r["b"] for r in json.loads(output.read_text())["records"]] == [64]


def test_a_record_has_a_hash_of_each_package_that_it_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("losses", "similarity/triton"):
        (tmp_path / name).mkdir(parents=True)
    source = tmp_path / "similarity/triton/kernel.py"
    source.write_text("one = 1\n")
    monkeypatch.setattr(records.megabatch, "__file__", str(tmp_path / "__init__.py"))
    before = records.environment()["sources"]
    source.write_text("one = 2\n")
    (tmp_path / "losses/notes.txt").touch()
    after = records.environment()["sources"]
    unchanged = {name: after[name] == before[name] for name in before}
    assert unchanged == {"losses": True, "similarity": False}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--batch-size 0", "--batch-size 0: expected greater than 0"),
        ("--batch-size", "--batch-size: expected at least one"),
        ("--scale nan", "--scale nan: expected a finite number"),
        ("--contenders dnse", "--contenders dnse: expected some of megabatch,"),
        ("--contenders dense dense", "--contenders dense: given 2 times"),
        ("--contenders dense-compiled", "--contenders dense-compiled: needs --device cuda"),
        ("--contenders openclip", "--contenders openclip: needs pip install open_clip_torch"),
        ("--device cuda", "no CUDA device"),
        ("--output {folder}", "is a folder, expected a file"),
        ("--output {folder}/file/r.json", "cannot be written"),
    ],
)
def test_refused_before_anything_is_measured(
    words: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(bench, "in_process", lambda *_: pytest.fail("measured"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(bench.importlib.util, "find_spec", lambda name: None)
    (tmp_path / "file").touch()
    given = ["--device", "cpu", *words.format(folder=tmp_path).split()]
    assert cli.main(["bench", "loss", *given[2 * ("--device" in words) :]]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


# --- one measurement ------------------------------------------------------------------------------


def alone(contender: str, max_memory: float | None = None) -> Record:
    options = LossOptions(seconds=1e-9, repetitions=1, max_memory=max_memory)
    return bench.in_process(Record(contender, "cpu", "float32", 2048, 32, 14.3), options)


@pytest.mark.parametrize("contender", ["dense", "megabatch"])
def test_memory_of_a_process(contender: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", programs.completed)
    found = alone(contender)
    assert found.status == "ok"
    assert found.extra_bytes is not None
    # Logits of 2,048 x 2,048 and two softmaxes; or the logits once, which fit the workspace. Pages
    # of libraries that this call is the first to touch count as well.
    assert (found.extra_bytes > 3 * 16 * MIB) == (contender == "dense")
    assert (found.extra_bytes < 40 * MIB) == (contender == "megabatch")


def test_processes_that_fail_are_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", programs.completed)
    few = alone("dense", max_memory=15 / 1024)
    assert (few.status, few.times_ms) == ("out of memory", ())
    assert "16777216 bytes" in few.note
    failed = alone("unheard-of")
    assert (failed.status, failed.note) == ("failed", "KeyError: 'unheard-of'")


def test_a_process_that_is_killed_is_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    for code, status, note in (
        (-signal.SIGKILL, "out of memory", "the operating system ended the process"),
        (-signal.SIGSEGV, "failed", "exit code -11"),
    ):
        ended = subprocess.CompletedProcess([], code, b"", b"")
        monkeypatch.setattr(subprocess, "run", lambda *_, ended=ended, **__: ended)
        result = alone("megabatch")
        assert (result.status, result.note) == (status, note)


def measured(name: str, dtype: str = "float32", device: str = "cpu", b: int = 96) -> Record:
    case = Record(name, device, dtype, b, 16, 14.3)
    return measure.measure(case, seconds=0.0, repetitions=2, max_memory=None)


@pytest.fixture
def _small_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "product_rate", lambda *_: 1e12)


@pytest.mark.usefixtures("_small_products")
@pytest.mark.parametrize("dtype", SANE)
@pytest.mark.parametrize("contender", ["megabatch", "dense", "openclip"])
def test_a_right_loss_is_ok(contender: str, dtype: str) -> None:
    found = measured(contender, dtype)
    assert (found.status, found.note, len(found.times_ms)) == ("ok", "", 2)
    for error in (found.max_row_error, found.loss_error, found.scale_gradient_error):
        assert error is not None
        assert 0 <= error <= SANE[dtype]


def greedy(x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
    if len(x) > 64:
        torch.empty(1 << 60)
    return dense_clip_loss(x, y, scale)


@pytest.mark.usefixtures("_small_products")
@pytest.mark.parametrize(
    ("loss", "status", "note"),
    [
        (lambda x, y, s: dense_clip_loss(x, y, s) / 2, "wrong", "gradient is off by"),
        (lambda x, y, s: dense_clip_loss(x, y, s) * torch.nan, "wrong", "not finite"),
        (greedy, "out of memory", "tried to allocate"),
    ],
)
def test_other_losses(loss: Any, status: str, note: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(measure.CONTENDERS, "other", lambda: loss)
    found = measured("other")
    assert found.status == status
    assert note in found.note


@pytest.mark.usefixtures("_small_products")
def test_half_precision_runs_under_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []

    def spy(*given: Tensor) -> Tensor:
        seen.append(torch.is_autocast_enabled("cpu"))
        return dense_clip_loss(*given)

    monkeypatch.setitem(measure.CONTENDERS, "spy", lambda: spy)
    for dtype, autocast in (("bfloat16", True), ("float32", False)):
        measured("spy", dtype)
        assert {*seen} == {autocast}
        seen.clear()


@pytest.mark.gpu
@pytest.mark.parametrize("contender", measure.CONTENDERS)
def test_on_cuda(contender: str) -> None:
    found = measured(contender, "bfloat16", "cuda", b=1024)
    assert found.status == "ok"
    assert (found.extra_bytes or 0) > 0


def test_calls_are_repeated_until_the_time_is_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    assert len(clock.times(lambda: calls.append(1), "cpu", seconds=0.0, repetitions=3)) == 3
    assert len(calls) == 4  # one to warm up
    now = [0.0]
    monkeypatch.setattr(clock.time, "perf_counter", lambda: now[0])
    takes = iter([0.25, *[0.125] * 20])  # the first call takes longer, and promises too few

    def call() -> None:
        now[0] += next(takes)

    assert clock.times(call, "cpu", seconds=1.0, repetitions=1) == [125.0] * 8


# --- the table ------------------------------------------------------------------------------------


def test_rounds_are_combined() -> None:
    slow = replace(OK, times_ms=(4.0, 6.0), product_tflops=3.0, extra_bytes=30)
    both = bench.combined([OK, slow])
    assert (both.ms, both.product_tflops, both.extra_bytes) == (4.0, 2.0, 30)
    assert both.fraction == pytest.approx(8 * 100**2 * 10 / 4e-3 / 2e12)
    assert bench.combined([OK, replace(OK, status="failed", note="x")]).note == "x"


def test_beside_the_first_of_the_same_size() -> None:
    made = [
        replace(OK, contender="megabatch", ms=10.0, fraction=0.08, extra_bytes=64 * MIB),
        replace(OK, ms=25.0, fraction=0.03, extra_bytes=128 * MIB),
        replace(OK, b=1 << 20, ms=123_456.7, fraction=0.5, extra_bytes=3 << 30),
        replace(OK, b=1 << 20, ms=None, status="out of memory"),
        replace(OK, b=1 << 20, ms=1.0, fraction=0.5, status="wrong"),
    ]
    console = Console(width=80, color_system=None)
    with console.capture() as capture:
        console.print(bench.table(made))
    lines = [" ".join(line.split()) for line in capture.get().splitlines()[2:]]
    assert lines[0] == "100 megabatch 10.0 1.0 8% 0.062 GiB 1.0 1.0e-01"
    assert lines[1] == "100 dense 25.0 2.5 3% 0.125 GiB 2.0 1.0e-01"
    assert lines[2] == "1,048,576 dense 123,456.7 1.0 50% 3.000 GiB 1.0 1.0e-01"
    assert lines[3] == "1,048,576 dense out of memory"
    assert lines[4].endswith("wrong")
