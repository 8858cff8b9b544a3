"""The example in docs/evaluation.md runs, and its options exist."""

from __future__ import annotations

import dataclasses
import re
import shlex
from pathlib import Path

import pytest

from megabatch.cli import main
from megabatch.evaluation.config import EvalConfig
from tests.docs.pages import ROOT, blocks

PAGE = "docs/evaluation.md"


def test_the_example_runs(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("megabatch.evaluation.probe._ITERATIONS", 20)  # of each of 16 fits
    Path("runs").mkdir()
    Path("runs/quickstart").symlink_to(run)
    export, from_python = blocks(PAGE, "python")
    exec(export, {})
    commands = [
        line for block in blocks(PAGE, "bash") for line in block.splitlines() if "digits" in line
    ]
    assert len(commands) == 2
    for command in commands:
        assert main(shlex.split(command)[1:]) == 0
    assert Path("evaluation/digits/report.html").is_file()
    assert Path("evaluation/pairs/evaluation.json").is_file()
    exec(from_python, {})


def test_every_option_named_exists() -> None:
    named = set(re.findall(r"--([a-z][a-z-]+)", (ROOT / PAGE).read_text("utf-8"))) - {
        "nproc-per-node"
    }
    options = {field.name.replace("_", "-") for field in dataclasses.fields(EvalConfig)}
    assert named <= options
    assert options - named <= {"run", "device", "batch-size", "csv-separator"}
