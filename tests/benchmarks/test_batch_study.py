"""benchmarks/batch_study.py on small files, and the figures of its record."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from machinery import study_data, study_plan
from machinery.study_summary import points, table
from tests.benchmarks.study_files import write_icons, write_wordnet
from tests.benchmarks.test_icons import load
from tests.benchmarks.test_scripts import run

#: One after the other on the CPU, with few features and three learning rates.
WORDS = "--sizes", "8", "16", "--samples", "32", "--seeds", "2", "--precision=fp32", "--gpus=0"


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study_data, "_BUCKETS", 512)
    monkeypatch.setattr(study_plan, "LOWEST_RATE", study_plan.FIRST_RATES[0])
    monkeypatch.setattr(study_plan, "HIGHEST_RATE", study_plan.FIRST_RATES[-1])


def call(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    load("batch_study").main(words)
    return capsys.readouterr().out.splitlines()


@pytest.mark.concurrency
@pytest.mark.usefixtures("small")
def test_a_study_is_continued_shown_and_plotted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "study.json"
    wordnet = write_wordnet(tmp_path / "wordnet", 100)
    words = (
        *WORDS,
        "--data=wordnet",
        "--losses=clip",
        f"--wordnet={wordnet}",
        f"--output={output}",
    )
    listed = call(capsys, *words, "--list")
    assert len(listed) == 3 * 3 + 2 * 5 + 1  # tuning, points, the sum
    assert "0 runs done" in listed[-1]
    assert call(capsys, *words, "--budget-seconds=0") == ["0 runs done, 19 left"]
    assert not output.exists()
    shown = call(capsys, *words)
    assert shown[-1] == "19 runs done, 0 left"
    content = json.loads(output.read_text())
    assert len(content["records"]) == len(shown) - 1 == 19
    content["records"] = content["records"][:-1]
    output.write_text(json.dumps(content))
    assert call(capsys, *words)[-1] == "19 runs done, 0 left"
    again = json.loads(output.read_text())
    assert [r["losses"] for r in again["records"][:-1]] == [r["losses"] for r in content["records"]]
    assert again["series"] == [{"data": "wordnet", "loss": "clip", "sizes": [8, 16], "samples": 32}]
    made = {(p.arm, p.size): p for p in points(again)}
    wide = [arm for arm in study_plan.ARMS if arm != "long"]
    assert set(made) == {(arm, size) for arm in wide for size in (8, 16)} | {
        ("long", 4),
        ("long", 8),
    }
    assert all(len(point.runs) == 2 for point in made.values())
    assert made["negatives", 16].runs == made["samples", 16].runs == made["steps", 16].runs
    assert [made["samples", size].steps for size in (8, 16)] == [4, 2]
    assert len(call(capsys, "--show", f"--output={output}")) == 2 + len(made) + 2
    run("plots.py", str(output))
    assert (tmp_path / "study-wordnet.png").exists()


@pytest.mark.concurrency
@pytest.mark.usefixtures("small")
def test_icons_and_the_other_losses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output, icons = tmp_path / "study.json", write_icons(tmp_path / "icons")
    words = (*WORDS, "--data=icons", f"--icons={icons}", f"--output={output}", "--seeds=1")
    given = "--sizes", "4", "--samples", "8"  # of the same options the last ones count
    call(capsys, *words, *given)
    content = json.loads(output.read_text())
    assert {record["loss"] for record in content["records"]} == {"clip", "siglip", "dcl"}
    assert all(record["status"] == "ok" for record in content["records"])
    about = content["tests"]["icons"]
    assert (about["train_pairs"], about["unseen"]["pairs"], about["unseen"]["texts"]) == (
        185,
        20,
        10,
    )
    assert about["unseen"]["chance"]["recall@1"] == pytest.approx(0.1)


def test_the_table_has_means_and_deviations() -> None:
    def record(seed: int, recall: float, **changes: Any) -> dict[str, Any]:
        tests = {name: {"recall@10": recall} for name in study_data.EVALUATED}
        run = {"data": "icons", "loss": "clip", "batch": 8, "group": 8, "steps": 4, "lr": 1e-3}
        return {**run, "seed": seed, "tests": tests, "losses": [2.0, 1.0 + seed], **changes}

    stopped = {k: v for k, v in record(2, 0.0).items() if k != "tests"}
    content = {
        "series": [{"data": "icons", "loss": "clip", "sizes": [8], "samples": 32}],
        "tests": {},
        "records": [record(0, 0.1), record(1, 0.2), stopped, record(study_plan.TUNING_SEED, 0.9)],
    }
    point = next(points(content))
    assert point.figure("unseen") == pytest.approx((0.15, 0.0707107), rel=1e-5)
    assert point.last_loss() == pytest.approx((1.5, 0.707107), rel=1e-5)
    lines = table(content).splitlines()
    assert (
        "| icons | clip | negatives | 8 | 4 | 0.001 | 2 (1 diverged) | 15.00 ± 7.07% |" in lines[2]
    )


def test_the_plan_covers_the_sizes_and_losses(capsys: pytest.CaptureFixture[str]) -> None:
    listed = call(capsys, "--list", "--output=none.json")
    for data, sizes in (("icons", ("1,024", "32,768")), ("wordnet", ("1,024", "16,384"))):
        for loss in ("clip", "siglip", "dcl"):
            for size in sizes:
                assert any(f"{data} {loss}, " in line and f" of {size}" in line for line in listed)
    points_of = [line for line in listed if "siglip" in line and "seed 0" in line]
    assert len(points_of) == 2 * 10  # three sizes in three arms, which share the largest; groups
