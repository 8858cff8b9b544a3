from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from megabatch import cli
from megabatch.benchmarking import bench, command
from megabatch.benchmarking.inputs import Case
from megabatch.benchmarking.measure import Effort, Result

if sys.platform != "linux":
    pytest.skip("the CPU is measured on Linux only", allow_module_level=True)

TINY = ["--device=cpu", "--width=8", "--seconds=0.01", "--product-size=64", "--rounds=1"]


def test_measures_prints_and_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "new" / "r.json"
    words = ["loss", "--batch-size", "64", "--contenders", "megabatch", *TINY]
    assert command.main([*words, "--output", str(output)]) == 0
    shown, progress = capsys.readouterr()
    assert "clip loss, forward + backward, d = 8, float32" in shown
    assert "Not measured" not in shown
    assert progress.startswith("megabatch, b = 64, round 1 of 1: ")
    assert progress.count("\n") == 1
    content = json.loads(output.read_text())
    assert content["command"].startswith("megabatch bench loss --batch-size 64 --contenders")
    (record,) = content["records"]
    assert (record["contender"], record["b"], record["status"]) == ("megabatch", 64, "ok")


@pytest.mark.parametrize(
    ("status", "code"), [("ok", 0), ("out of memory", 0), ("failed", 1), ("wrong", 1)]
)
def test_exit_code(
    status: str, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    result = Result(status, "because", (1.0,), (1e9, 1e9), 10, 0.1, 0.1, 0.1)
    monkeypatch.setattr(bench, "in_process", lambda case, effort: result)
    assert command.main(["loss", "--contenders", "dense", *TINY]) == code
    shown = capsys.readouterr().out
    assert (f"dense, b = 8,192: {status}: because" in shown) == (status != "ok")


def test_says_what_the_defaults_leave_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    result = Result("ok", "", (1.0,), (1e9, 1e9), 10, 0.1, 0.1, 0.1)
    measured: list[str] = []

    def start(case: Case, effort: Effort) -> Result:
        measured.append(f"{case.contender} {case.b}")
        return result

    monkeypatch.setattr(bench, "in_process", start)
    assert command.main(["loss", *TINY]) == 0
    assert measured == [
        f"{n} 8192" for n in ("megabatch", "megabatch-keeping", "dense", "openclip")
    ]
    shown = " ".join(capsys.readouterr().out.split())
    assert "Not measured, to save time: two-products, which computes the same as openclip" in shown
    assert "Not measured, to save time: larger batches" in shown


def test_records_of_the_sizes_done_survive_an_interrupt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(case: Case, effort: Effort) -> Result:
        if case.b == 128:
            raise KeyboardInterrupt
        return Result("ok", "", (1.0,), (1e9, 1e9), 10, 0.1, 0.1, 0.1)

    monkeypatch.setattr(bench, "in_process", start)
    output = tmp_path / "r.json"
    words = ["loss", "--batch-size", "64", "128", "--contenders", "dense"]
    with pytest.raises(KeyboardInterrupt):
        command.main([*words, "--output", str(output), *TINY])
    assert [r["b"] for r in json.loads(output.read_text())["records"]] == [64]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--batch-size 0", "--batch-size 0: expected at least 1"),
        ("--batch-size", "--batch-size: expected at least one"),
        ("--width -3", "--width -3: expected at least 1"),
        ("--scale nan", "--scale nan: expected a number above 0"),
        ("--seconds 0", "--seconds 0: expected a number above 0"),
        ("--contenders dnse", "--contenders dnse: expected some of megabatch,"),
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
    (tmp_path / "file").touch()
    words = words.format(folder=tmp_path)
    assert cli.main(["bench", "loss", "--device", "cpu", *words.split()]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_cuda_where_there_is_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert cli.main(["bench", "loss", "--device", "cuda"]) == 2
    assert "no CUDA device" in capsys.readouterr().err
