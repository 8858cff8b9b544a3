from __future__ import annotations

from pathlib import Path

import pytest

from megabatch.cli import main
from megabatch.errors import UsageError
from megabatch.evaluation.command import process_group


def test_eval_prints_each_figure_with_baseline_and_chance(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", str(run), "--batch-size", "256"]) == 0
    out = capsys.readouterr().out
    lines = [line.strip() for line in out.splitlines()]
    told = out[: out.index("held-out faces, image → text")].splitlines()
    assert told[0].endswith("model.safetensors) on cpu, fp32:")
    assert told[1].startswith("  retrieval: held-out faces, 348 images")
    assert told[3] == "  classification: handwritten digits, 1,797 images (zero-shot)"
    assert told[4].startswith("  prompts: “digit {}”, ")
    assert max(len(line) for line in out.splitlines()[5:]) <= 80 + len(str(run))
    for title in ("held-out faces, image → text", "held-out characters, text → image"):
        assert any(line.startswith(title) for line in lines)
    assert [line.split()[0] for line in lines if "%" in line] == (
        ["model", "pixel", "chance", "model", "chance"] * 2 + ["model", "pixel", "chance"]
    )
    assert "…" not in out
    assert "report.html" in out
    assert "images/s" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing-folder"], "megabatch eval: missing-folder is no folder"),
        ([".", "--device", "nowhere"], "megabatch eval: --device nowhere: cannot be used"),
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
    assert main(["eval", *arguments]) == 2
    err = capsys.readouterr().err
    assert err.startswith(message)
    assert err.count("\n") == 1


def test_help_names_the_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "--help"]) == 0
    out = capsys.readouterr().out
    for option in ("RUN", "--val-data", "--device", "--precision", "--batch-size"):
        assert option in out


def test_a_group_that_cannot_be_formed_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("RANK", raising=False)
    with (
        pytest.raises(UsageError, match=r"the processes cannot be joined: .*RANK"),
        process_group(),
    ):
        pass
