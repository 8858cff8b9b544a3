"""The program's commands, exit codes and messages."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from megabatch import cli
from megabatch.errors import UsageError


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


def test_without_the_trainers_libraries_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli.importlib.util, "find_spec", lambda _: None)
    assert cli.main(["train"]) == 2
    assert "megabatch[train]" in capsys.readouterr().err


def test_an_unknown_option_is_refused_with_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "--learning-rate-typo", "1"]) == 2
    assert "--learning-rate-typo" in capsys.readouterr().err


def test_an_unknown_model_is_refused_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "run"
    assert cli.main(["train", "--model", "ViT-B32", "--output", str(output)]) == 2
    assert "did you mean ViT-B-32" in capsys.readouterr().err
    assert not output.exists()


def test_python_m_megabatch_is_the_same_program() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "megabatch", "nonsense"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "unknown command 'nonsense'" in done.stderr
    assert "Traceback" not in done.stderr
