"""Settings that give way to others that were asked for more."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megabatch.cli import main
from megabatch.config.command_line import parse
from megabatch.config.problems import problems
from megabatch.config.resolve import (
    Level,
    fine_tuned,
    given_in,
    length_conflicts,
    name_defaults,
    resolve,
)
from megabatch.errors import UsageError
from megabatch.hints import with_value
from megabatch.training import TrainConfig, load_config, save_config
from megabatch.training.setup import prepare
from tests.models.tiny_bert import save_tiny_bert
from tests.training.conftest import MakeConfig
from tests.training.runs import logged, weights

DEFAULT, FILE, OPTION = Level


def options(config: TrainConfig, *names: str) -> list[str]:
    """A small run's settings as a user would type them."""
    names = ("model", "train_data", "output", "global_batch_size", "micro_batch_size", *names)
    words = [[f"--{n.replace('_', '-')}", str(getattr(config, n))] for n in names]
    always = ["--precision", "fp32", "--device", "cpu", "--plan", "off"]
    return ["train", *(word for pair in words for word in pair), *always]


def test_few_steps_take_a_short_warm_up_and_say_so(
    make_config: MakeConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_config(tmp_path / "run", steps=6)
    assert main(options(config, "steps")) == 0
    out = capsys.readouterr().out
    assert "the warm-up takes 1 of 6 steps (--warmup changes it)\n" in out
    assert "--warmup 20" not in out
    first, second = tmp_path / "run", tmp_path / "second"
    assert [record["lr"] for record in logged(first)][:2] == [TrainConfig.lr] * 2
    assert main(["train", "--config", f"{first}/config.toml", "--output", str(second)]) == 0
    assert weights(first) == weights(second)


def test_a_warm_up_that_was_asked_for_is_refused(
    make_config: MakeConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = [*options(make_config(tmp_path / "run", steps=6), "steps"), "--warmup", "20"]
    assert main(asked) == 2
    assert capsys.readouterr().err == ("megabatch train: --warmup 20: the run has only 6 steps\n")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["quickstart", "benchmarks/icons.toml"])
def test_a_configuration_takes_other_data(
    name: str, make_config: MakeConfig, tmp_path: Path
) -> None:
    small = make_config(tmp_path / "run", steps=6)
    more = ["--no-torchcompile", "--workers", "0"]
    config, given = parse(["--config", name, *options(small, "steps")[1:], *more])
    setup = prepare(config, given=given)
    assert not setup.config.evaluate
    assert setup.config.warmup == (1 if config.warmup else None)
    evaluation = ["--evaluate: expected --val-data with it, held-out pairs; taking --no-evaluate"]
    assert [note for note in setup.notes if "evaluate" in note] == evaluation * config.evaluate


def test_an_evaluation_that_was_asked_for_needs_its_data(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    small = make_config(tmp_path / "run", steps=6)
    config, given = parse([*options(small, "steps")[1:], "--config", "quickstart", "--evaluate"])
    with pytest.raises(UsageError, match=r"^--evaluate: expected --val-data with it"):
        prepare(config, given=given)


def test_a_file_that_contradicts_itself_is_refused(make_config: MakeConfig, tmp_path: Path) -> None:
    save_config(make_config(tmp_path, evaluate=True, warmup=13), tmp_path / "c.toml")
    config, given = parse(["--config", str(tmp_path / "c.toml"), "--output", str(tmp_path / "r")])
    with pytest.raises(UsageError, match="--evaluate"):
        prepare(config, given=given)
    with pytest.raises(UsageError, match=r"^--warmup 13: the run has only 12 steps$"):
        prepare(replace(config, evaluate=False), given=given)


CASES: list[tuple[dict[str, Any], str, str, Any]] = [
    # settings; of which one gives way; to which; what it then is
    ({"decode": "late", "workers": 0}, "workers", "decode", 1),
    ({"decode": "late", "workers": 0}, "decode", "workers", "early"),
    ({"csv_img_key": "a", "csv_query_key": "b"}, "csv_img_key", "csv_query_key", None),
    ({"csv_img_key": "a", "csv_query_key": "b"}, "csv_query_key", "csv_img_key", None),
    ({"evaluate": True, "train_data": "x.csv"}, "evaluate", "train_data", False),
    ({"evaluate": False, "val_data": "x.csv"}, "evaluate", "val_data", True),
    ({"evaluate": False, "val_data": "x.csv"}, "val_data", "evaluate", None),
    ({"duplicates": "positives", "loss": "infonce"}, "duplicates", "loss", "negatives"),
    ({"label_smoothing": 0.1, "loss": "siglip"}, "label_smoothing", "loss", 0.0),
    ({"label_smoothing": 0.1, "duplicates": "ignored"}, "label_smoothing", "duplicates", 0.0),
    (
        {"label_smoothing": 0.1, "duplicates": "ignored"},
        *("duplicates", "label_smoothing", "negatives"),
    ),
    ({"infonce_margin": 0.1, "loss": "clip"}, "infonce_margin", "loss", None),
    ({"lr_cooldown": 5, "lr_scheduler": "cosine"}, "lr_cooldown", "lr_scheduler", None),
    (
        {"lock_image": False, "lock_image_unlocked_groups": 2},
        *("lock_image", "lock_image_unlocked_groups", True),
    ),
    (
        {"lock_text": False, "lock_text_unlocked_layers": 2},
        *("lock_text_unlocked_layers", "lock_text", 0),
    ),
]


@pytest.mark.parametrize(("settings", "lower", "higher", "value"), CASES)
@pytest.mark.parametrize(("low", "high"), [(DEFAULT, FILE), (DEFAULT, OPTION), (FILE, OPTION)])
def test_what_was_asked_for_less_gives_way(
    settings: dict[str, Any], lower: str, higher: str, value: Any, low: Level, high: Level
) -> None:
    config = replace(TrainConfig(), **settings)
    (reason,) = problems(config)
    resolved, (note,) = resolve(config, {lower: low, higher: high})
    assert resolved == replace(config, **{lower: value})
    assert problems(resolved) == []
    asked = with_value(higher, getattr(config, higher))
    assert note.startswith(f"{asked}: taking " if low == DEFAULT else f"{reason}; taking ")


def test_a_default_that_gives_way_is_not_named() -> None:
    for settings, note in (
        ({"val_data": "x.csv"}, "--val-data x.csv: taking --evaluate"),
        ({"decode": "late"}, "--decode late: taking --workers 1"),
    ):
        config = replace(TrainConfig(), **settings)  # type: ignore[arg-type]
        assert resolve(config, given_in(config))[1] == [note]


@pytest.mark.parametrize(
    ("message", "given", "expected"),
    [
        (
            "--global-batch-size 4096: expected",
            (),
            "--global-batch-size 4096 (the default): expected",
        ),
        ("--global-batch-size 4096: expected", ("global_batch_size",), None),
        ("--global-batch-size 40960: expected", (), None),
        ("--eps 0.1: --opt adamw does", ("eps",), "--eps 0.1: --opt adamw (the default) does"),
        ("--output runs/train: holds", (), "--output runs/train (the default): holds"),
        ("--output runs/train/b: holds", (), None),
        ("--evaluate: expected --val-data with it", (), None),
    ],
)
def test_values_that_nobody_set_are_called_defaults(
    message: str, given: tuple[str, ...], expected: str | None
) -> None:
    assert name_defaults(message, dict.fromkeys(given, OPTION)) == expected or message


@pytest.mark.parametrize(("settings", "lower", "higher", "value"), CASES)
@pytest.mark.parametrize("level", [FILE, OPTION])
def test_what_was_asked_for_alike_is_left_to_be_refused(
    settings: dict[str, Any], lower: str, higher: str, value: Any, level: Level
) -> None:
    config = replace(TrainConfig(), **settings)
    assert resolve(config, dict.fromkeys(settings, level)) == (config, [])


@pytest.mark.parametrize("low", [DEFAULT, FILE])
def test_epochs_replace_the_steps_of_a_weaker_source(low: Level) -> None:
    config = TrainConfig(steps=6, epochs=3)
    resolved, (note,) = resolve(config, {"steps": low, "epochs": Level(low + 1)})
    assert resolved == replace(config, steps=None)
    assert note == "--steps 6: --epochs 3 is given instead; taking no --steps"
    assert resolve(config, {"steps": OPTION, "epochs": FILE}) == (config, [])
    assert resolve(config, {"steps": FILE, "epochs": FILE}) == (config, [])  # as a run's own file


def test_a_configuration_in_python_asks_for_what_is_no_default() -> None:
    config = TrainConfig(steps=6, lr=0.5)
    assert given_in(config) == {"steps": OPTION, "lr": OPTION}


@pytest.mark.parametrize(
    ("settings", "levels", "expected", "note"),
    [
        ({"steps": 6}, {"steps": OPTION}, {}, ""),
        (
            {"steps": 1, "warmup": 20},
            {"steps": OPTION, "warmup": FILE},
            {"warmup": 0},
            "--warmup 20: the run has only 1 step; taking --warmup 0",
        ),
        ({"steps": 20, "warmup": 20}, {"steps": OPTION, "warmup": FILE}, {}, ""),
        ({"steps": 30, "lr_cooldown": 20, "lr_scheduler": "wsd"}, {"steps": OPTION}, {}, ""),
        (
            {"steps": 30, "lr_cooldown": 20, "lr_scheduler": "wsd", "warmup": 20},
            {"steps": OPTION, "lr_cooldown": OPTION, "lr_scheduler": OPTION, "warmup": FILE},
            {"warmup": 2},
            "--warmup 20: the run has only 10 steps before its --lr-cooldown 20; taking --warmup 2",
        ),
        (
            {"steps": 30, "lr_cooldown": 20, "lr_scheduler": "wsd", "warmup": 15},
            {"steps": OPTION, "lr_cooldown": FILE, "lr_scheduler": FILE, "warmup": OPTION},
            {"lr_cooldown": None},
            "; taking no --lr-cooldown",
        ),
        (
            {"steps": 6, "lr_cooldown": 20, "lr_scheduler": "wsd", "warmup": 2},
            {"steps": OPTION, "lr_cooldown": FILE, "lr_scheduler": FILE, "warmup": FILE},
            {"lr_cooldown": None},
            "--lr-cooldown 20: the run has only 6 steps; taking no --lr-cooldown",
        ),
    ],
)
def test_what_a_short_run_has_no_room_for(
    settings: dict[str, Any], levels: dict[str, Level], expected: dict[str, Any], note: str
) -> None:
    config = replace(TrainConfig(), **settings)
    steps = settings["steps"]
    resolved, notes = resolve(config, levels, lambda c: length_conflicts(c, steps))
    assert resolved == replace(config, **expected)
    assert len(notes) == len(expected)
    assert note in "".join(notes)
    assert length_conflicts(resolved, steps) == []


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_bert(tmp_path_factory.mktemp("hf") / "bert")


def test_a_pretrained_text_encoder_has_the_defaults_of_fine_tuning(
    bert: Path, make_config: MakeConfig, tmp_path: Path
) -> None:
    (tmp_path / "pairs.jsonl").write_text('{"query": "a", "positive": "b"}\n' * 8)
    config = make_config(
        tmp_path / "run", model=f"hf:{bert}", train_data=str(tmp_path / "pairs.jsonl"), steps=30
    )
    setup = prepare(config)
    assert (setup.config.lr, setup.config.wd, setup.config.warmup) == (2e-5, 0.01, 2)
    note = (
        f"hf:{bert} has weights, so the defaults are those of fine-tuning: --lr 2e-05 --wd 0.01 "
        "(instead of 0.001 and 0.2)"
    )
    assert note in setup.notes


@pytest.mark.parametrize("level", [FILE, OPTION])
def test_settings_of_the_user_stand_when_fine_tuning(bert: Path, level: Level) -> None:
    config = TrainConfig(model=f"hf:{bert}")
    assert fine_tuned(config, {"lr": level, "wd": level}) == (config, [])
    tuned, (note,) = fine_tuned(config, {"lr": level})
    assert tuned == replace(config, wd=0.01)
    assert "fine-tuning: --wd 0.01 (instead of 0.2)" in note


def test_a_resumed_run_keeps_the_rate_that_it_had(bert: Path, tmp_path: Path) -> None:
    save_config(TrainConfig(model=f"hf:{bert}", output=tmp_path), tmp_path / "config.toml")
    config, given = parse(["--resume", "--output", str(tmp_path)])
    assert config.lr == TrainConfig.lr
    assert fine_tuned(config, given) == (config, [])


def test_weights_of_other_kinds_keep_the_defaults_and_say_so(bert: Path, tmp_path: Path) -> None:
    weights = Path("clip.safetensors")
    note = "has weights, but --lr 0.001 is meant for random ones"
    for settings in (
        {"model": "ViT-B-32", "pretrained": weights},
        {"model": "local-dir:clip"},
        {"model": f"hf:{bert}", "opt": "lamb"},
    ):
        config = replace(TrainConfig(), **settings)
        same, (line,) = fine_tuned(config, {})
        assert same == config
        assert note in line
        assert fine_tuned(config, {"lr": FILE}) == (config, [])
    # Trained from random weights: all of it, or the tower that is not locked.
    (tmp_path / "config.json").write_text("{}")
    for settings in (
        *({"model": "ViT-B-32"}, {"model": f"hf:{tmp_path}"}, {"model": "mine:towers"}),
        {"model": "ViT-B-32", "pretrained": weights, "lock_image": True},
    ):
        config = replace(TrainConfig(), **settings)
        assert fine_tuned(config, {}) == (config, [])


def test_a_resumed_run_keeps_the_settings_that_are_not_given_again(
    make_config: MakeConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_config(tmp_path / "run", steps=6)
    assert main([*options(config, "steps"), "--lr", "0.002"]) == 0
    capsys.readouterr()
    assert main(["train", "--resume", "--output", str(config.output), "--steps", "10"]) == 0
    recorded = load_config(config.output / "config.toml")
    assert (recorded.steps, recorded.lr, recorded.warmup) == (10, 0.002, None)
    assert "continuing after step 6" in capsys.readouterr().out


def test_the_same_command_continues_a_run_whose_warm_up_gave_way(
    make_config: MakeConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_config(tmp_path / "run", steps=6)
    save_config(make_config("anywhere", warmup=10, steps=40), tmp_path / "c.toml")
    command = [*options(config), "--config", str(tmp_path / "c.toml")]
    assert main([*command, "--steps", "6"]) == 0
    assert "taking --warmup 1" in capsys.readouterr().out
    assert main([*command, "--steps", "12", "--resume"]) == 0
    assert load_config(config.output / "config.toml").warmup == 10
