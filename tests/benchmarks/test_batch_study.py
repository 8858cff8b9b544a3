"""benchmarks/batch_study.py on small files, and the figures of its record."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import batch_study
from batch_study import TUNING_SEED, Point, expected_seconds, samples_by_time, tuned
from machinery import text_pairs
from machinery.study import Run
from machinery.study_data import StudyData
from tests.benchmarks.study_files import write_icons, write_texts
from tests.benchmarks.test_scripts import run


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_study, "SIZES", {"icons": (8,), "texts": (8,)})
    monkeypatch.setattr(text_pairs, "VOCABULARY", 128)  # tables of 16,384 take seconds
    monkeypatch.setattr(batch_study, "OTHERS", (("icons", "siglip", 8, 8),))
    monkeypatch.setattr(batch_study, "LOWEST_RATE", batch_study.RATES[0])
    monkeypatch.setattr(batch_study, "HIGHEST_RATE", batch_study.RATES[-1])


def call(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    batch_study.main(words)
    return capsys.readouterr().out.splitlines()


@pytest.mark.concurrency
@pytest.mark.usefixtures("small")
def test_a_study_is_continued_shown_and_plotted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output, texts = tmp_path / "study.json", write_texts(tmp_path / "texts.npz", 12)
    words = (f"--texts={texts}", f"--output={output}", "--data=texts", "--samples=8",
             "--seeds=2", "--gpus=0")  # fmt: skip
    listed = call(capsys, *words, "--list")
    assert len(listed) == 3 + 1  # rates, and the sum
    assert "0 runs done" in listed[-1]
    shown = call(capsys, *words)
    assert shown[-1] == "6 runs done, 0 can begin"  # 3 rates, a warm-up and 2 seeds
    content = json.loads(output.read_text())
    assert len(content["records"]) == len(shown) - 1
    assert content["tests"]["texts"]["train_pairs"] == 12
    content["records"] = content["records"][:-1]
    output.write_text(json.dumps(content))
    assert call(capsys, *words, "--budget-seconds=0")[-1] == "5 runs done, 1 can begin"
    assert call(capsys, *words)[-1] == "6 runs done, 0 can begin"
    again = json.loads(output.read_text())
    assert again["records"][:-1] == content["records"]
    run("plots.py", str(output))
    assert (tmp_path / "study-texts.png").exists()


@pytest.mark.concurrency
@pytest.mark.usefixtures("small")
def test_packed_icons_and_another_loss(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "icons.npz"
    call(capsys, "--pack", str(write_icons(tmp_path / "icons")), str(file))
    output = tmp_path / "study.json"
    call(capsys, f"--icons={file}", f"--output={output}", "--data=icons", "--samples=8",
         "--seeds=1", "--gpus=0")  # fmt: skip
    records = json.loads(output.read_text())["records"]
    assert {record["loss"] for record in records} == {"clip", "siglip"}
    assert all(record["status"] == "ok" for record in records)
    tests = {"in_domain", "unseen", "seen", "validation", "training_loss"}
    assert records[-1]["final"].keys() == tests


@pytest.mark.concurrency
@pytest.mark.usefixtures("small")
def test_measured_times_give_runs_of_equal_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_study, "CLOCK", 8)
    monkeypatch.setattr(batch_study, "SIZES", {"texts": (4, 8)})
    monkeypatch.setattr(batch_study, "OTHERS", (("texts", "hard-2", 8, 8),))

    def step_time(run: Run, data: StudyData, seconds: float) -> dict[str, Any]:
        assert (len(data.train.ids), seconds) == (12, 2.5)
        shape = {name: getattr(run, name) for name in Point._fields}
        return {**shape, "ms": {4: 1.0, 8: 4.0}[run.batch]}

    monkeypatch.setattr(batch_study, "step_time", step_time)
    texts, output = write_texts(tmp_path / "texts.npz", 12), tmp_path / "study.json"
    words = (f"--texts={texts}", f"--output={output}", "--data=texts", "--samples=8",
             "--seeds=1", "--gpus=0")  # fmt: skip
    call(capsys, *words, "--time=2.5")
    assert [t["batch"] for t in json.loads(output.read_text())["times"]] == [4, 8]
    call(capsys, *words, "--sizes-only")
    runs = [r for r in json.loads(output.read_text())["records"] if r["seed"] == 0]
    assert {(r["batch"], r["steps"]) for r in runs} == {(4, 2), (4, 4), (8, 1)}


def record(recall: float) -> dict[str, Any]:
    return {"final": {"validation": {"recall@10": recall}}, "seconds": 1.0}


def test_the_rule_looks_further_while_the_best_is_at_an_end() -> None:
    point, found = Point("icons", "fixed-20", 1024, 1024), {}
    for _ in range(10):
        lr, warmup, missing = tuned(point, 2**21, found)
        for one in missing:
            found[one] = record(0.5 + one.warmup if one.lr == 4e-3 else one.lr)
    assert (lr, warmup) == (4e-3, 0.3)
    assert {r.lr for r in found} == {1e-3, 2e-3, 4e-3, 8e-3}
    assert {(r.loss, r.steps, r.seed) for r in found} == {("clip", 512, TUNING_SEED)}
    assert len(found) == 4 + 1  # and a warm-up


@pytest.mark.parametrize(
    ("data", "batch", "own", "steps"),
    [("icons", 131_072, 65_536, 512), ("texts", 8192, 4096, 2048)],
)
def test_some_batches_take_another_ones_rate(data: str, batch: int, own: int, steps: int) -> None:
    _, _, missing = tuned(Point(data, "clip", batch, batch), 2**25, {})
    assert {(run.batch, run.steps) for run in missing} == {(own, steps)}


def test_runs_of_equal_time_have_the_samples_that_fit_into_it() -> None:
    times = [
        {"data": "icons", "loss": "clip", "batch": b, "group": b, "ms": ms}
        for b, ms in ((1024, 4.0), (65_536, 128.0))
    ]
    small = Point("icons", "clip", 1024, 1024)
    assert samples_by_time(small, 10 * 65_536, times) == 10 * 32 * 1024
    assert samples_by_time(small._replace(batch=65_536, group=65_536), 65_536, times) == 0
    assert samples_by_time(small._replace(loss="siglip"), 65_536, times) == 0
    own = {"data": "icons", "loss": "sogclr-0.9", "batch": 1024, "group": 1024, "ms": 8.0}
    constant = small._replace(loss="sogclr-0.9-50")
    assert samples_by_time(constant, 10 * 65_536, [*times, own]) == 10 * 16 * 1024
    times[0]["ms"] = 2.05  # nearly as long for as many samples
    assert samples_by_time(small, 10 * 65_536, times) == 0


def test_only_sizes_below_the_clock_have_runs_of_equal_time() -> None:
    times = [
        {"data": "icons", "loss": "clip", "batch": b, "group": b, "ms": ms}
        for b, ms in ((1024, 4.0), (65_536, 128.0), (131_072, 512.0))
    ]
    words = ("--data=icons", "--seeds=1", "--sizes-only", f"--samples={2**25}")
    options, found = batch_study._options(words), {}
    while missing := batch_study.pending(options, found, times):
        found |= {run: record(run.warmup) for run in missing}
    of = {b: {r.steps for r in found if (r.batch, r.seed) == (b, 0)} for b in (1024, 131_072)}
    assert of == {1024: {2**15, 2**14}, 131_072: {2**8}}


def test_the_time_of_a_run_is_expected_by_its_batch() -> None:
    one = Run("icons", "clip", 1024, 1024, 100, 1e-3, 0.1, 0)
    other = Run("icons", "clip", 4096, 4096, 100, 1e-3, 0.1, 0)
    found = {one: {"seconds": 10.0}, other: {"seconds": 50.0}}
    longer = Run("icons", "clip", 1024, 512, 300, 2e-3, 0.1, 7)
    assert expected_seconds(longer, found) == 30.0
    assert expected_seconds(Run("texts", "clip", 1024, 1024, 9, 1e-3, 0.1, 0), found) == 50.0
    assert expected_seconds(one, {}) == 0.0
