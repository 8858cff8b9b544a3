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
from megabatch.options import option
from megabatch.training import TrainConfig


def test_without_a_command_usage_is_printed_and_the_exit_code_is_2(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main([]) == 2
    assert cli.main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"\n  {name} " in out for name in cli.COMMANDS)


class Stopped(UsageError):
    exit_code = 1


@pytest.mark.parametrize(
    ("error", "code", "told"),
    [
        (None, 7, ""),
        (UsageError("lr: -1"), 2, "megabatch train: lr: -1\n"),
        (Stopped("disk full"), 1, "megabatch train: disk full\n"),
        (KeyboardInterrupt(), 130, "megabatch train: interrupted\n"),
        (SystemExit(0), 0, ""),
    ],
)
def test_options_reach_the_command_whose_error_is_one_line_and_an_exit_code(
    error: BaseException | None,
    code: int,
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def main(argv: list[str]) -> int:
        assert argv == ["--lr", "1"]
        if error is not None:
            raise error
        return 7

    monkeypatch.setattr(cli.pkgutil, "resolve_name", lambda _: main)
    assert cli.main(["train", "--lr", "1"]) == code
    assert capsys.readouterr().err == told


NAMED = "--model ViT-B-32 --train-data glyphs"
#: Wrong command lines, and what their messages contain.
WRONG = {
    "trian": "unknown command 'trian'; did you mean train?",
    "zzz": "unknown command 'zzz'; expected train, eval",
    "train": "--model: needed, as an option or in a --config\n  - --train-data: needed",
    "train --modle x": "did you mean --model",
    "train --batch-size 3": "did you mean --micro-batch-size or --global-batch-size?",
    f"train {NAMED} --loss infonse": "did you mean infonce?",
    f"train {NAMED} --device gpu": "--device gpu: String should match",
    f"train {NAMED} --output run": "holds a run already",
    "train --resume --output gone": "--model: needed",
    "train --config quikstart": "did you mean quickstart?",
    "plan": "--model: needed",
    "plan --model ViT-B-32 --gpu-name H100x": "expected one of H200, .*did you mean H100?",
    "plan --model ViT-B-32 --gpu-memory 80Gx": "--gpu-memory 80Gx: expected a size",
    "eval gone": "gone is not a folder",
    "export gone --to openclip --output o": "gone is not a folder",
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


def test_wrong_usage_is_told_before_a_library_is_imported(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.toml").write_text('model = "glyph-small"')
    ended = subprocess.run(
        [sys.executable, "-c", HASTE, json.dumps([*WRONG])],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(Path(megabatch.__file__).parents[1])},
    )
    assert ended.returncode == 0, ended.stderr
    found = dict(zip(WRONG, json.loads(ended.stdout), strict=True))
    for line, (code, told, imported) in found.items():
        assert re.search(WRONG[line].replace("?", r"\?"), told), (line, told)
        assert (code, imported) == (2, False), line  # to import torch takes seconds


def test_python_m_megabatch_is_the_same_program() -> None:
    words = [sys.executable, "-m", "megabatch", "nonsense"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("megabatch: unknown command 'nonsense'")


GUARD = """
import os, sys
from megabatch.cli import COMMANDS, main
for columns in ("80", "120"):
    os.environ["COLUMNS"] = columns
    assert not any(main([*name.split(), "--help"]) for name in COMMANDS)
    print("@@@")
print(*sys.modules)
"""


@pytest.fixture(scope="module")
def helps() -> list[str]:
    """What all commands print after --help, at widths 80 and 120, and the modules imported."""
    ended = subprocess.run([sys.executable, "-c", GUARD], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.split("@@@\n")


def test_help_waits_for_no_library(helps: list[str]) -> None:
    assert not {"torch", "numpy", "rich", "PIL"} & set(helps[2].split())


def test_help_has_all_options_fits_the_terminal_and_breaks_no_word(helps: list[str]) -> None:
    for columns, text in zip((80, 120), helps, strict=False):
        assert max(map(len, text.splitlines())) <= columns
    assert helps[0].split() == helps[1].split()
    listed = set(re.findall(r"^  (--[\w-]+)", helps[0], re.M))
    assert {"--config", "--gpus", *(option(field.name) for field in fields(TrainConfig))} <= listed


def test_versions_are_on_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"megabatch {megabatch.__version__} (torch {torch.__version__}, ")
    assert "CUDA" in line
