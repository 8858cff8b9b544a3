"""The program's commands, exit codes and messages."""

from __future__ import annotations

import io
import itertools
import json
import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import megabatch
from megabatch import cli
from megabatch.errors import UsageError
from megabatch.training import TrainConfig


def run_command(monkeypatch: pytest.MonkeyPatch, main: object) -> int:
    monkeypatch.setattr(cli.importlib, "import_module", lambda _: SimpleNamespace(main=main))
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
    ("word", "hint"), [("trian", "did you mean train?"), ("zzz", "expected one of train, eval")]
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


def test_a_name_that_is_not_utf_8_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["data", "inspect", os.fsdecode(b"b\xe4d.csv")]) == 2
    assert capsys.readouterr().err == "megabatch: 'b\\udce4d.csv': expected text in UTF-8\n"


def test_characters_that_the_terminal_lacks_are_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    output = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(output, encoding="ascii"))

    def main(argv: list[str]) -> int:
        print("grün", flush=True)
        return 0

    assert run_command(monkeypatch, main) == 0
    assert output.getvalue() == b"gr\\xfcn\n"


def test_a_user_error_is_one_line_and_exit_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(monkeypatch, raising(UsageError("lr: -1"))) == 2
    assert capsys.readouterr().err == "megabatch train: lr: -1\n"


def test_errors_may_bring_their_own_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stopped(UsageError):
        exit_code = 1

    assert run_command(monkeypatch, raising(Stopped("disk full"))) == 1


def test_ctrl_c_is_exit_code_130_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(monkeypatch, raising(KeyboardInterrupt())) == 130
    assert capsys.readouterr().err == "megabatch train: interrupted\n"


def test_a_parser_that_exits_gives_its_code(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_command(monkeypatch, raising(SystemExit(0))) == 0
    assert run_command(monkeypatch, raising(SystemExit(2))) == 2


def test_an_unknown_option_is_refused_with_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "--learning-rate-typo", "1"]) == 2
    assert "--learning-rate-typo" in capsys.readouterr().err


def test_an_unknown_model_is_refused_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "run"
    named = ["--model", "ViT-B32", "--train-data", "glyphs", "--output", str(output)]
    assert cli.main(["train", *named]) == 2
    assert "did you mean ViT-B-32" in capsys.readouterr().err
    assert not output.exists()


NAMED = "--model ViT-B-32 --train-data glyphs"
#: Wrong command lines, and what their messages contain.
WRONG = {
    "trian": "did you mean train?",
    "train": "--model and --train-data: not given",
    "train --modle x": "did you mean --model?",
    "train --batchsize 3": "--batchsize: no such option; use --global-batch-size,",
    "train --model ViT-B32 --train-data glyphs": "did you mean ViT-B-32 or .*`megabatch models`",
    "train --model qqq --train-data glyphs": "'qqq' is not known .`megabatch models` lists all",
    "train --model bert --train-data glyphs": "'bert' is not known; did you mean hf:bert?",
    "train --model saved --train-data glyphs": "; did you mean local-dir:saved?",
    "train --model hf:saved --train-data glyphs": "no config.json; did you mean local-dir:saved?",
    "train --model hf:org/name --train-data glyphs": "nothing is downloaded.* pip install "
    "huggingface_hub; hf download org/name --local-dir PATH; then --model hf:PATH",
    "train --model org/name --train-data glyphs": "hf download org/name .* --model hf:PATH",
    "train --model hf-hub:org/name --train-data glyphs": "download org/name .*local-dir:PATH",
    "train --model hf:/no/where/at/all --train-data glyphs": "no folder /no/where/at/all$",
    "train --model mine:model --train-data glyphs": "No module named .mine.",
    f"train {NAMED} --pretrained openai": "get_pretrained_cfg.'ViT-B-32', 'openai'.*hf download",
    f"train {NAMED} --pretrained gone.pt": "there is no file gone.pt",
    f"train {NAMED} --pretrained-text-path gone.pt": "--pretrained-text-path: there is no file",
    f"train {NAMED} --epochs 0": "--epochs 0: expected at least 1",
    f"train {NAMED} --loss infonse": "did you mean infonce?",
    f"train {NAMED} --loss clip --hard-negatives 1": "expected --loss infonce",
    f"train {NAMED} --report-to tensorbord": "did you mean tensorboard?",
    f"train {NAMED} --device gpu": "--device gpu: expected auto",
    f"train {NAMED} --output run": "holds a run already",
    f"train {NAMED} --momentum 0.5": "--opt adamw .the default. does not use it; expected --opt",
    "train --model ViT-B-32 --train-data gone.csv": "--train-data: nothing matches gone.csv",
    "train --resume --output gone": "--output gone holds no run",
    "train --config quikstart": "did you mean quickstart?",
    "plan": "--model: not given",
    "plan --model ViT-B32": "did you mean ViT-B-32",
    "plan --model ViT-B-32 --epochs 0": "--epochs 0: expected at least 1",
    "plan --model ViT-B-32 --gpu-name H100x": "expected one of H200, .*did you mean H100?",
    "plan --model ViT-B-32 --gpu-memory 80Gx": "--gpu-memory 80Gx: expected a size",
    "eval": "expected either a run's folder or --model NAME",
    "eval gone": "gone is not a folder",
    "eval --model ViT-B32 --val-data glyphs --output o": "did you mean ViT-B-32",
    "eval run --precision bf61": "--precision bf61: .*; did you mean bf16?",
    "export gone --to openclip --output o": "gone is not a folder",
    "export run --to open_clip --output o": "; did you mean openclip?",
    "report gone": "gone is not a folder",
    "data inspect gone.csv": "nothing matches gone.csv",
    "data inspekt": "did you mean inspect?",
    "models ViT": "'ViT': not expected",
    "bench los": "did you mean loss?",
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
    files = ("bert/config.json", "saved/open_clip_config.json", "run/config.toml")
    for path in (folder / name for name in files):
        path.parent.mkdir()
        path.write_text('model = "glyph-small"' if path.suffix == ".toml" else "{}")
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
    assert re.search(WRONG[line].replace("?", r"\?"), told.rstrip("\n")), told
    assert told.count("\n") == 1
    assert not imported  # which takes seconds


def test_python_m_megabatch_is_the_same_program() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "megabatch", "nonsense"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "unknown command 'nonsense'" in done.stderr
    assert "Traceback" not in done.stderr


COMMANDS = [
    *("train --help-all", "plan --help-all", "train --help", "plan --help", "eval --help"),
    *("export --help", "models --help", "bench loss --help", "data glyphs --help"),
    *("data inspect --help", "data --help", "bench --help"),
]
WIDTHS = (80, 100, 120)
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
    words = [",".join(COMMANDS), ",".join(map(str, WIDTHS))]
    environment = os.environ | {"FORCE_COLOR": "1"}
    ended = subprocess.run(
        [sys.executable, "-c", GUARD, *words], capture_output=True, text=True, env=environment
    )
    assert ended.returncode == 0, ended.stderr
    return dict(zip(WIDTHS, ended.stdout.split("@@@\n"), strict=False))


def test_help_waits_for_no_library(helps: dict[int, str]) -> None:
    modules = helps[80].splitlines()[-1].split()[1:]
    assert "megabatch" in modules
    assert not {"torch", "numpy", "rich", "PIL"} & set(modules)


@pytest.mark.parametrize("columns", WIDTHS)
def test_help_fits_the_terminal_and_is_plain_text(columns: int, helps: dict[int, str]) -> None:
    lines = helps[columns].splitlines()
    assert max(len(line) for line in lines if not line.startswith("###")) <= columns
    assert "\x1b" not in helps[columns]


@pytest.mark.parametrize("columns", WIDTHS)
def test_help_breaks_no_word_and_no_line_early(columns: int, helps: dict[int, str]) -> None:
    wide = " ".join(helps[120].split())
    assert " ".join(helps[columns].split()) == wide  # broken between words alone
    lines = helps[columns].splitlines()
    width = min(columns, 100)
    for line, after in itertools.pairwise(lines):
        if line.startswith("      ") and after.startswith("      "):  # a text and how it goes on
            assert len(line) + 1 + len(after.split()[0]) > width


def test_help_has_every_option_of_training_in_a_group(helps: dict[int, str]) -> None:
    text = helps[80].split("### ")[1 + COMMANDS.index("train --help-all")]
    for field in fields(TrainConfig):
        assert f"\n  --{field.name.replace('_', '-')}" in text
    for group in ("model", "data", "loss", "optimizer", "learning rate", "precision"):
        assert f"\n\n{group}:\n" in text


@pytest.mark.parametrize(
    ("command", "needed"),
    [("train", "--train-data --resume --lr --config"), ("plan", "--gpus --gpu-name --config")],
)
def test_short_help_has_few_options_and_tells_of_the_rest(
    command: str, needed: str, helps: dict[int, str]
) -> None:
    parts = helps[80].split("### ")
    short, whole = (parts[1 + COMMANDS.index(f"{command} {o}")] for o in ("--help", "--help-all"))
    options, all_options = (re.findall(r"^  (?:-h, )?(--[\w-]+)", t, re.M) for t in (short, whole))
    assert {*needed.split(), "--model", "--help-all"} <= set(options) < set(all_options)
    assert len(options) <= 16
    counted = len(all_options) - 2  # without these two
    assert short.endswith(f"  --help-all\n      Show all {counted} options.\n")


def test_versions_are_on_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"megabatch {megabatch.__version__} (torch {torch.__version__}, ")
    assert "Triton" in line
    assert "CUDA" in line
