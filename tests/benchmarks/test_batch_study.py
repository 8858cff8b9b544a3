"""benchmarks/batch_study.py on small files, and the figures of its record."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import batch_study
from machinery import study, study_data
from tests.benchmarks.study_files import write_icons, write_wordnet
from tests.benchmarks.test_scripts import run

#: One after the other on the CPU, with few features and three learning rates.
WORDS = "--sizes", "8", "16", "--samples", "32", "--seeds", "2", "--precision=fp32", "--gpus=0"


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study_data, "_BUCKETS", 512)
    monkeypatch.setattr(study, "LOWEST_RATE", study.FIRST_RATES[0])
    monkeypatch.setattr(study, "HIGHEST_RATE", study.FIRST_RATES[-1])


def call(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    batch_study.main(words)
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
    assert len(listed) == 3 * 3 + 1  # tuning, the sum
    assert "0 runs done" in listed[-1]
    assert call(capsys, *words, "--budget-seconds=0") == ["0 runs done, 9 can begin"]
    assert not output.exists()
    shown = call(capsys, *words)
    assert shown[-1] == "19 runs done, 0 can begin"
    content = json.loads(output.read_text())
    assert len(content["records"]) == len(shown) - 1 == 19
    content["records"] = content["records"][:-1]
    output.write_text(json.dumps(content))
    assert call(capsys, *words)[-1] == "19 runs done, 0 can begin"
    again = json.loads(output.read_text())
    assert [r["losses"] for r in again["records"][:-1]] == [r["losses"] for r in content["records"]]
    assert again["series"] == [{"data": "wordnet", "loss": "clip", "sizes": [8, 16], "samples": 32}]
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


def test_the_plan_covers_the_sizes_and_losses(capsys: pytest.CaptureFixture[str]) -> None:
    listed = call(capsys, "--list", "--output=none.json")
    for data, sizes in (("icons", ("1,024", "32,768")), ("wordnet", ("1,024", "16,384"))):
        for loss in ("clip", "siglip", "dcl"):
            for size in sizes:
                assert any(f"{data} {loss}, " in line and f" of {size}" in line for line in listed)
