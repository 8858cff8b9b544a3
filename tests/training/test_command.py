"""Options to configurations, and the command's own messages."""

from __future__ import annotations

from pathlib import Path

import pytest

from megabatch.cli import main
from megabatch.config.command_line import parse
from megabatch.errors import UsageError
from megabatch.training import TrainConfig, load_config, train


def test_without_options_it_is_the_default() -> None:
    assert parse([]) == (TrainConfig(), {})


def test_options_override_the_file_which_overrides_the_defaults(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("lr = 0.5\nseed = 3\nsteps = 8\n")
    options = ["--global-batch-size", "64", "--lr=0.25", "--resume", "--steps", "None"]
    expected = TrainConfig(lr=0.25, seed=3, global_batch_size=64, resume=True)
    assert parse(["--config", str(path), *options])[0] == expected
    assert parse([*options, f"--config={path}"])[0] == expected


def test_a_packaged_configuration_is_known_by_name() -> None:
    assert parse(["--config", "quickstart"])[0] == load_config("quickstart")


def test_underscores_will_do() -> None:
    assert parse(["--micro_batch_size", "7"])[0].micro_batch_size == 7
    assert parse(["--micro-batch-size", "auto"])[0].micro_batch_size == "auto"


def test_an_unknown_configuration_is_refused() -> None:
    with pytest.raises(UsageError, match="neither a file nor one of"):
        parse(["--config", "nonsense"])


@pytest.mark.parametrize(
    "options",
    [["--lr", "fast"], ["--precision", "int8"], ["--micro-batch-size", "1.5"], ["--cnofig", "x"]],
)
def test_options_that_make_no_sense_end_it_with_exit_code_2(
    options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", *options]) == 2
    assert options[0] in capsys.readouterr().err


def test_help_explains_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--help-all"]) == 0
    out = capsys.readouterr().out
    assert "Pairs that go through the towers at a time" in out
    assert "--checkpoint-every" in out


def test_an_impossible_setting_is_one_line_on_stderr(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "run"
    named = ["--model", "glyph-small", "--train-data", "glyphs", "--output", str(output)]
    assert main(["train", *named, "--micro-batch-size", "0"]) == 2
    captured = capsys.readouterr()
    assert captured.err == "megabatch train: --micro-batch-size 0: expected at least 1\n"
    assert captured.out == ""
    assert not output.exists()


@pytest.mark.parametrize(
    ("given", "lacking"),
    [
        ([], "--model and --train-data: not given; name both, such as --model ViT-B-32 --train-"),
        (["--train-data", "photos.csv"], "--model: not given; name it, such as --model ViT-B-32"),
        (["--model", "ViT-B-32"], "--train-data: not given; name it, such as --train-data 'sh"),
        (["--resume"], "--resume: --output {output} holds no run; a new one: --model and --train-"),
    ],
)
def test_a_model_and_data_have_to_be_named(
    given: list[str], lacking: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "run"
    assert main(["train", *given, "--output", str(output)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"megabatch train: {lacking.format(output=output)}")
    assert error.endswith(", or a configuration, such as --config quickstart\n")
    assert not output.exists()


def test_in_python_too() -> None:
    with pytest.raises(UsageError, match="--model and --train-data: not given"):
        train(TrainConfig())
