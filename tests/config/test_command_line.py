"""Options and files to configurations; what a length or a pretrained encoder changes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megabatch.cli import main
from megabatch.config.command_line import parse
from megabatch.errors import UsageError
from megabatch.training import TrainConfig, load_config, save_config
from megabatch.training.setup import weight_notes
from tests.models.tiny_bert import save_tiny_bert
from tests.training.conftest import MakeConfig
from tests.training.runs import weights


def test_options_override_the_file_which_overrides_the_defaults(tmp_path: Path) -> None:
    assert parse([]) == TrainConfig()
    assert parse(["--config", "quickstart"]) == load_config("quickstart")
    path = tmp_path / "mine.toml"
    path.write_text("lr = 0.5\nseed = 3\nsteps = 8\nepochs = 2\n")
    options = ["--global-batch-size", "64", "--lr=0.25", "--resume", "--steps", "None"]
    expected = TrainConfig(lr=0.25, seed=3, epochs=2, global_batch_size=64, resume=True)
    assert parse(["--config", str(path), *options]) == expected
    assert parse([*options, f"--config={path}"]) == expected


def test_a_length_as_an_option_replaces_the_files(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text("steps = 8\nepochs = 16\n")
    assert parse(["--config", str(path)]) == TrainConfig(steps=8)
    assert parse(["--config", str(path), "--epochs", "3"]) == TrainConfig(epochs=3)
    assert parse(["--config", str(path), "--steps", "3"]) == TrainConfig(steps=3)
    with pytest.raises(UsageError, match="--epochs --steps: expected one of them"):
        parse(["--epochs", "3", "--steps", "3"])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('loss = "m:L"', "loss = 'm:L' would run code, .* --trust allows it"),
        ('model = "m:f"', "model = 'm:f' would run code"),
        ('val_data = "a.tar::pipe:cat b.tar"', "val_data = 'a.tar::pipe:cat b.tar' would run code"),
    ],
)
def test_a_file_may_name_code_only_if_it_is_trusted(
    line: str, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "config.toml"
    path.write_text(line)
    for words in (["--config", str(path)], ["--resume", "--output", str(tmp_path)]):
        with pytest.raises(UsageError, match=message):
            parse(words)
        assert parse([*words, "--trust"])
    name = line.partition(" ")[0].replace("_", "-")
    assert parse(["--config", str(path), f"--{name}", "clip"])  # the option's value counts


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"hf:{save_tiny_bert(tmp_path_factory.mktemp('hf') / 'bert')}"


def test_a_pretrained_text_encoder_has_the_defaults_of_fine_tuning(
    bert: str, tmp_path: Path
) -> None:
    tuned = TrainConfig(model=bert, lr=2e-5, wd=0.01)
    assert parse(["--model", bert]) == tuned
    assert parse(["--model", bert, "--lr", "0.001"]) == replace(tuned, lr=0.001)
    assert parse(["--model", bert, "--opt", "lamb"]) == TrainConfig(model=bert, opt="lamb")
    note = f"{bert} has weights, so the defaults are those of fine-tuning: --lr 2e-05 --wd 0.01"
    assert weight_notes(tuned) == [note]
    save_config(TrainConfig(model=bert, output=tmp_path), tmp_path / "config.toml")
    again = parse(["--resume", "--output", str(tmp_path)])
    assert (again.lr, again.wd) == (TrainConfig.lr, TrainConfig.wd)


def test_the_rate_of_random_weights_is_noted_where_there_are_others(
    bert: str, tmp_path: Path
) -> None:
    weights = Path("clip.safetensors")
    (tmp_path / "config.json").write_text("{}")
    for config in (
        TrainConfig(model="ViT-B-32", pretrained=weights),
        TrainConfig(model="local-dir:clip"),
        TrainConfig(model=bert),
    ):
        (note,) = weight_notes(config)
        assert "has weights, but --lr 0.001 is meant for random ones" in note
        assert weight_notes(replace(config, lr=1e-4)) == []
    # Trained from random weights: all of it, or the tower that is not locked.
    for config in (
        *(TrainConfig(model=name) for name in ("ViT-B-32", f"hf:{tmp_path}", "mine:towers")),
        TrainConfig(model="ViT-B-32", pretrained=weights, lock_image=True),
    ):
        assert weight_notes(config) == []


def test_a_runs_own_file_repeats_it_and_continues_it(
    make_config: MakeConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = make_config(tmp_path / "run", steps=6), tmp_path / "second"
    words = [f"--{n}={getattr(first, n.replace('-', '_'))}" for n in ("model", "train-data")]
    sizes = ["--global-batch-size=8", "--micro-batch-size=4", "--steps=6", "--lr", "0.002"]
    always = ["--precision", "fp32", "--device", "cpu", "--plan", "off", "--report-to"]
    assert main(["train", *words, *sizes, *always, "--output", str(first.output)]) == 0
    assert "the warm-up takes 1 of 6 steps (--warmup changes it)\n" in capsys.readouterr().out
    own = str(first.output / "config.toml")
    assert main(["train", "--config", own, "--output", str(second)]) == 0
    assert weights(first.output) == weights(second)
    assert main(["train", "--resume", "--output", str(second), "--steps", "8"]) == 0
    assert "continuing after step 6" in capsys.readouterr().out
    recorded = load_config(second / "config.toml")
    assert (recorded.steps, recorded.lr, recorded.warmup) == (8, 0.002, None)
    assert main(["train", "--resume", "--output", str(second), "--lr", "0.001"]) == 2
    assert "--lr was 0.002, is 0.001" in capsys.readouterr().err
