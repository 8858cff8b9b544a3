"""Every command of the examples' pages runs, at small size, and what it trains beats chance."""

from __future__ import annotations

import json
import math
import os
import re
import runpy
import sys
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import pytest

from megabatch.cli import main
from tests.docs.pages import ROOT, blocks
from tests.docs.test_shell import commands

EXAMPLES = ROOT / "examples"
PAGES = sorted(str(page.relative_to(ROOT)) for page in EXAMPLES.glob("*/README.md"))


class Small(NamedTuple):
    """A program at small size, and chance; `is_loss`: the figure is a loss, of log(1 / chance)."""

    options: str
    chance: float
    figure: str = r"x_to_y/recall@1: ([\d.]+)"
    before: str | None = None
    needs: str | None = None
    is_loss: bool = False


TRAINED = {"figure": r"([\d.]+) after", "before": r"([\d.]+) before"}
SCRIPTS = {
    "digit_halves/digit_halves.py": Small("--steps 8", 1 / 300),
    "digit_halves/hf_trainer.py": Small(
        "--steps 20", 1 / 300, r"eval_loss: ([\d.]+)", needs="transformers", is_loss=True
    ),
    "digit_halves/lightning_module.py": Small("--steps 8", 1 / 300, needs="lightning"),
    "simclr/simclr.py": Small("--steps 6", 1 / 300, **TRAINED),
    "simclr/lightly_simclr.py": Small("--steps 6", 1 / 300, **TRAINED, needs="lightly"),
    "labelled_embeddings/supcon.py": Small("--steps 4", 1 / 10, **TRAINED),
    "labelled_embeddings/metric_learning.py": Small(
        "--steps 4", 1 / 10, **TRAINED, needs="pytorch_metric_learning"
    ),
    "retriever/wordnet_glosses.py": Small(
        "--count 500 --steps 6", 1 / 500, **TRAINED, needs="sentence_transformers"
    ),
    "three_modalities/three_modalities.py": Small(
        "--steps 4 --characters 50", 1 / 50, r"recall@1 ([\d.]+)"
    ),
    "late_interaction/late_interaction.py": Small(
        "--functions 1200 --steps 4",
        1 / 500,
        r"word: .* before, recall@1 ([\d.]+)",
        r"word: recall@1 ([\d.]+)",
    ),
    "recommender/recommender.py": Small(
        "--users 200 --items 400 --steps 60",
        1 / 20,
        r"with log_q: recall@20 ([\d.]+)",
        r"without: recall@20 ([\d.]+)",
    ),
    "distillation/distill.py": Small("--steps 12", 10 / 300, r"distilled: recall@10 ([\d.]+)"),
}
#: Scripts that write data for `megabatch train`, and the run: what to add to both commands.
RUNS = {
    "images_and_captions": (
        "--count 600",
        "--global-batch-size 200 --micro-batch-size 100 --epochs 3 --warmup 2 --plan off",
    ),
    "retriever": (
        "--count 600",
        "--global-batch-size 200 --micro-batch-size 100 --epochs 2 --plan off",
    ),
}


def shown(page: str) -> list[list[str]]:
    return [words for code in blocks(page, "bash") for words in commands(code)]


def run(script: str, options: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a script in this process, which has imported the libraries already."""
    monkeypatch.setattr(sys, "argv", [script, *options.split()])
    monkeypatch.syspath_prepend(str((EXAMPLES / script).parent))
    with mock.patch.dict(os.environ):  # lightning's seed
        runpy.run_path(str(EXAMPLES / script), run_name="__main__")


def found(pattern: str, text: str) -> float:
    (value,) = re.findall(pattern, text, re.M)
    return float(value)


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_beats_chance(
    script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = SCRIPTS[script]
    if small.needs:
        pytest.importorskip(small.needs)
    run(script, small.options, monkeypatch)
    printed = capsys.readouterr().out
    learnt = found(small.figure, printed)
    if small.is_loss:
        assert learnt < math.log(1 / small.chance) - 0.1, printed
    else:
        assert learnt > 2 * small.chance, printed
    if small.before:
        assert learnt > found(small.before, printed), printed


@pytest.mark.parametrize(
    ("script", "options", "message"),
    [
        ("retriever/hard_negatives.py", "--count 4", "--count: expected more than 4, got 4"),
        (
            "late_interaction/late_interaction.py",
            "--functions 30",
            "--functions: expected more, to hold out 500, got 30",
        ),
        (
            "recommender/recommender.py",
            "--items 19",
            "--items: expected at least 20, got 19",
        ),
        (
            "three_modalities/three_modalities.py",
            "--characters 1",
            "--characters: expected at least 2, got 1",
        ),
    ],
)
def test_a_size_that_a_script_cannot_use_is_refused(
    script: str,
    options: str,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if script.startswith("retriever"):
        pytest.importorskip("transformers")
    with pytest.raises(SystemExit, match="2"):
        run(script, options, monkeypatch)
    printed, told = capsys.readouterr()
    assert printed == ""
    assert told.splitlines()[-1].endswith(f"error: {message}")


@pytest.mark.parametrize("folder", RUNS)
def test_a_run_on_data_that_a_script_writes_beats_chance(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if folder == "retriever":
        pytest.importorskip("transformers")
    python, train, *_ = shown(f"examples/{folder}/README.md")
    assert (python[0], train[:2]) == ("python", ["megabatch", "train"])
    of_data, of_run = RUNS[folder]
    monkeypatch.chdir(tmp_path)
    config = (ROOT / train[train.index("--config") + 1]).read_text()
    data = re.search(r'^train_data = "(runs/[\w-]+)/', config, re.M)
    assert data is not None
    script = python[1].removeprefix("examples/")
    run(script, f"--output {tmp_path / data[1]} {of_data}", monkeypatch)
    words = [str(ROOT / word) if word.endswith(".toml") else word for word in train[1:]]
    assert main([*words, *of_run.split()]) == 0
    output = re.search(r'^output = "(.*)"', config, re.M)
    assert output is not None
    evaluation = json.loads(Path(output[1], "evaluation.json").read_text())
    model, chance = (
        evaluation["retrieval"]["pairs"][of]["image_to_text/recall@1"] for of in ("model", "chance")
    )
    assert model > 2 * chance


def test_every_script_is_shown_and_run() -> None:
    scripts = {str(path.relative_to(EXAMPLES)) for path in EXAMPLES.glob("*/*.py")}
    data = {shown(f"examples/{folder}/README.md")[0][1] for folder in RUNS}
    imported = {"retriever/wordnet.py"}
    assert scripts == {*SCRIPTS, *imported, *(name.removeprefix("examples/") for name in data)}
    words = {word for page in PAGES for command in shown(page) for word in command}
    assert {f"examples/{script}" for script in scripts - imported} <= words
    assert {page.split("/")[1] for page in PAGES} == {
        p.name for p in EXAMPLES.iterdir() if p.is_dir()
    }
