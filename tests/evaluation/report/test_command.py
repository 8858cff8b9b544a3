from __future__ import annotations

from pathlib import Path

import pytest

from megabatch.cli import main
from tests.evaluation.report.conftest import write_run


def test_a_run_s_page_and_a_comparison_are_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [str(write_run(tmp_path / name, loss=3)) for name in "ab"]
    assert main(["report", runs[0]]) == 0
    assert capsys.readouterr().out == f"report: {runs[0]}/report.html\n"
    assert "a" in (tmp_path / "a" / "report.html").read_text()
    output = tmp_path / "new" / "both.html"
    assert main(["report", *runs, "--output", str(output)]) == 0
    assert "2 runs compared" in output.read_text()
    assert main(["report", "--output", str(output), runs[0]]) == 0
    assert "2 runs compared" not in output.read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "RUN: needed, but not given"),
        (["a", "b"], "--output: needed to compare several runs"),
        (["missing"], "missing is not a folder"),
        (["empty"], "empty is not a run: it has neither config.toml nor evaluation.json"),
        (["a", "--output", "empty"], "--output empty: is a folder"),
        (["a", "--output", "a/config.toml/x.html"], "--output a/config.toml/x.html: "),
        (["a", "empty", "--output", "x.html"], "empty is not a run"),
    ],
)
def test_user_errors_are_one_line(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "a", loss=3)
    (tmp_path / "empty").mkdir()
    assert main(["report", *arguments]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"megabatch report: {message}")
    assert err.count("\n") == 1
    assert not (tmp_path / "x.html").exists()


def test_help_names_the_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "--help"]) == 0
    out = capsys.readouterr().out
    for word in ("RUN", "--output", "report.html"):
        assert word in out
