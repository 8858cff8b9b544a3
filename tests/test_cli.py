"""The program's commands, exit codes and messages."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import torch

import megabatch
from megabatch import cli
from megabatch.errors import UsageError
from megabatch.hints import option
from megabatch.training import TrainConfig


def run_command(monkeypatch: pytest.MonkeyPatch, main: object) -> int:
    monkeypatch.setattr(cli.pkgutil, "resolve_name", lambda _: main)
    return cli.main(["train", "--lr", "1"])


def raising(error: BaseException) -> object:
    def main(argv: list[str]) -> int:
        raise error

    return main


def test_without_a_command_usage_is_printed_and_the_exit_code_is_2(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main([]) == 2
    assert cli.main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"\n  {name} " in out for name in cli.COMMANDS)


@pytest.mark.parametrize(
    ("word", "hint"), [("trian", "did you mean train?"), ("zzz", "expected train, eval")]
)
def test_an_unknown_command_is_named(
    word: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([word]) == 2
    error = capsys.readouterr().err
    assert repr(word) in error
    assert hint in error
    assert error.count("\n") == 1


def test_options_reach_the_command_and_its_exit_code_comes_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: list[list[str]] = []

    def main(argv: list[str]) -> int:
        given.append(argv)
        return 7

    assert run_command(monkeypatch, main) == 7
    assert given == [["--lr", "1"]]


class Stopped(UsageError):
    exit_code = 1


@pytest.mark.parametrize(
    ("error", "code", "told"),
    [
        (UsageError("lr: -1"), 2, "megabatch train: lr: -1\n"),
        (Stopped("disk full"), 1, "megabatch train: disk full\n"),
        (KeyboardInterrupt(), 130, "megabatch train: interrupted\n"),
        (SystemExit(0), 0, ""),
    ],
)
def test_errors_are_one_line_and_an_exit_code(
    error: BaseException,
    code: int,
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run_command(monkeypatch, raising(error)) == code
    assert capsys.readouterr().err == told


NAMED = "--model ViT-B-32 --train-data glyphs"
#: Wrong command lines, and what their messages contain.
WRONG = {
    "trian": "did you mean train?",
    "train": "--model: needed, as an option or in a --config\n  - --train-data: needed",
    "train --modle x": "did you mean --model?",
    "train --batchsize 3": "--batchsize: no such option; use --global-batch-size,",
    "train --local-loss --accum-freq 2": "--local-loss: .* leave it out\n.* use --micro-batch-size",
    f"train {NAMED} --epochs 0": "--epochs 0: expected at least 1",
    f"train {NAMED} --loss infonse": "did you mean infonce?",
    f"train {NAMED} --report-to tensorbord": "did you mean tensorboard?",
    f"train {NAMED} --device gpu": "--device gpu: expected auto",
    f"train {NAMED} --output run": "holds a run already",
    f"train {NAMED} --momentum 0.5": "expected with --opt lars or --opt sgd, got --opt adamw",
    "train --resume --output gone": "--model: needed",
    "train --config quikstart": "did you mean quickstart?",
    "plan": "--model: needed",
    "plan --model ViT-B-32 --epochs 0": "--epochs 0: expected at least 1",
    "plan --model ViT-B-32 --gpu-name H100x": "expected one of H200, .*did you mean H100?",
    "plan --model ViT-B-32 --gpu-memory 80Gx": "--gpu-memory 80Gx: expected a size",
    "eval": "expected either a run's folder or --model NAME",
    "eval gone": "gone is not a folder",
    "eval run --precision bf61": "--precision bf61: .*; did you mean bf16?",
    "export gone --to openclip --output o": "gone is not a folder",
    "export run --to open_clip --output o": "; did you mean openclip?",
    "export run": "the following arguments are required: --to, --output",
    "report gone": "gone is not a folder",
    "data inspekt": "did you mean data inspect?",
    "models ViT": "'ViT': not expected",
    "bench los": "did you mean bench loss?",
}
HASTE = """
import contextlib, io, json, sys
from megabatch.cli import main
told = []
for line in json.loads(sys.argv[1]):
    with contextlib.redirect_stderr(io.StringIO()) as error:
        code = main(line.split())
    told.append((code, error.getvalue(), "torch" in sys.modules or "open_clip" in sys.modules))
print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def complaints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str, bool]]:
    """How wrong command lines end, in one process: code, message, whether torch was imported."""
    folder = tmp_path_factory.mktemp("wrong")
    (folder / "run").mkdir()
    (folder / "run/config.toml").write_text('model = "glyph-small"')
    ended = subprocess.run(
        [sys.executable, "-c", HASTE, json.dumps([*WRONG])],
        capture_output=True,
        text=True,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(Path(megabatch.__file__).parents[1])},
    )
    assert ended.returncode == 0, ended.stderr
    return dict(zip(WRONG, json.loads(ended.stdout), strict=True))


@pytest.mark.parametrize("line", WRONG)
def test_wrong_usage_is_told_before_a_library_is_imported(
    line: str, complaints: dict[str, tuple[int, str, bool]]
) -> None:
    code, told, imported = complaints[line]
    assert code == 2
    assert re.search(WRONG[line].replace("?", r"\?"), told), told
    assert not imported  # which takes seconds


def test_python_m_megabatch_is_the_same_program() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "megabatch", "nonsense"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "unknown command 'nonsense'" in done.stderr
    assert "Traceback" not in done.stderr


HELPS = ["train --help-all", "plan --help-all", *(f"{name} --help" for name in cli.COMMANDS)]
GUARD = """
import os, sys
from megabatch.cli import main
for columns in sys.argv[2].split(","):
    os.environ["COLUMNS"] = columns
    for words in sys.argv[1].split(","):
        print("###", words, flush=True)
        assert main(words.split()) == 0
    third_party = {name.partition(".")[0] for name in sys.modules} - set(sys.stdlib_module_names)
    print("###", *sorted(name for name in third_party if not name.startswith("_")))
    print("@@@")
"""


@pytest.fixture(scope="module")
def helps() -> dict[int, str]:
    """What all commands print after --help, by the width of the terminal."""
    ended = subprocess.run(
        [sys.executable, "-c", GUARD, ",".join(HELPS), "80,120"], capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    return dict(zip((80, 120), ended.stdout.split("@@@\n"), strict=False))


def test_help_waits_for_no_library(helps: dict[int, str]) -> None:
    modules = helps[80].splitlines()[-1].split()[1:]
    assert "megabatch" in modules
    assert not {"torch", "numpy", "rich", "PIL"} & set(modules)


def test_help_fits_the_terminal_and_breaks_no_word(helps: dict[int, str]) -> None:
    for columns, text in helps.items():
        assert max(len(line) for line in text.splitlines() if line[:3] != "###") <= columns
    assert helps[80].split() == helps[120].split()


def test_short_help_has_few_options_and_the_whole_one_all(helps: dict[int, str]) -> None:
    parts = helps[80].split("### ")
    for command, needed in (("train", "--resume --lr"), ("plan", "--gpus --gpu-name")):
        short, whole = (parts[1 + HELPS.index(f"{command} {o}")] for o in ("--help", "--help-all"))
        listed, all_listed = (set(re.findall(r"^  (--[\w-]+)", t, re.M)) for t in (short, whole))
        assert {*needed.split(), "--model", "--config", "--help-all"} <= listed < all_listed
        assert len(listed) <= 16
        assert f"show all {len(all_listed) - 1} options" in short
        assert {option(field.name) for field in fields(TrainConfig)} <= all_listed


def test_versions_are_on_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"megabatch {megabatch.__version__} (torch {torch.__version__}, ")
    assert "CUDA" in line
