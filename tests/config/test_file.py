"""Configurations written to TOML and read back, from options and files; faulty files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megabatch.cli import main
from megabatch.config.file import parse
from megabatch.config.settings import problems
from megabatch.errors import UsageError
from megabatch.training import TrainConfig, load_config, save_config
from megabatch.training.setup import weight_notes
from tests.models.tiny_bert import save_tiny_bert
from tests.training.conftest import MakeConfig
from tests.training.runs import weights

texts = st.text(st.characters(codec="utf-8"))


@settings(max_examples=25)
@given(
    config=st.builds(
        TrainConfig,
        model=texts,
        train_data=texts,
        output=st.just(Path('a "b" \\ ü/run')),
        pretrained=st.none() | st.just(Path("w.safetensors")),
        global_batch_size=st.integers(1, 2**40),
        steps=st.none() | st.integers(1, 10**9),
        lr=st.floats(0, 1e300, exclude_min=True),
        init_logit_bias=st.none() | st.floats(-1e9, 1e9),
        precision=st.sampled_from(["fp32", "bf16", "fp16"]),
        torchcompile=st.none() | st.booleans(),
        matryoshka_dims=st.lists(st.integers(1)).map(tuple),
    )
)
def test_what_is_saved_is_what_is_read(
    config: TrainConfig, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("toml") / "config.toml"
    save_config(replace(config, resume=True), path)
    assert load_config(path) == config
    assert [p.name for p in path.parent.iterdir()] == ["config.toml"]


def test_configurations_that_are_shown_are_possible_and_keep_what_they_promise() -> None:
    quickstart, icons = load_config("quickstart"), load_config("benchmarks/icons.toml", trust=True)
    for config in (quickstart, icons, *map(load_config, Path("examples").glob("*/*.toml"))):
        assert problems(config, "model", "train_data") == []
    assert quickstart.global_batch_size >= 2048
    assert icons.global_batch_size >= 32_768


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"lrr = 4", "--lrr 4: no such option; did you mean --lr?"),
        (b"help = true", "--help True: no such option; "),
        (b'seed = "x"', "--seed x: expected a valid integer"),
        (b"[model]\nname = 1\nresume", "cannot be read: "),
        (b"lr = = 1", "cannot be read: Invalid value"),
        (b"\xff\xfe", "cannot be read: 'utf-8'"),
    ],
)
def test_a_faulty_file_is_named_with_its_fault(
    content: bytes, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "c.toml"
    path.write_bytes(content)
    with pytest.raises(UsageError) as caught:
        load_config(path)
    assert str(caught.value).startswith(f"--config {path}: {message}")


def test_a_name_that_is_no_file_is_named_with_a_similar_one() -> None:
    with pytest.raises(UsageError, match=r"No such file.*; did you mean quickstart\?"):
        load_config("quickstrat")
    with pytest.raises(UsageError, match="--config /: cannot be read"):
        load_config("/")


# --- options and files ----------------------------------------------------------------------------


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


def test_a_pretrained_text_encoder_has_the_defaults_of_fine_tuning(tmp_path: Path) -> None:
    bert = f"hf:{save_tiny_bert(tmp_path / 'bert')}"
    tuned = TrainConfig(model=bert, lr=2e-5, wd=0.01)
    assert parse(["--model", bert]) == tuned
    assert parse(["--model", bert, "--lr", "0.001"]) == replace(tuned, lr=0.001)
    assert parse(["--model", bert, "--opt", "lamb"]) == TrainConfig(model=bert, opt="lamb")
    save_config(TrainConfig(model=bert, output=tmp_path), tmp_path / "config.toml")
    again = parse(["--resume", "--output", str(tmp_path)])
    assert (again.lr, again.wd) == (TrainConfig.lr, TrainConfig.wd)


def test_the_rate_of_random_weights_is_noted_where_there_are_others(tmp_path: Path) -> None:
    weights, bert = Path("clip.safetensors"), save_tiny_bert(tmp_path / "bert")
    (tmp_path / "config.json").write_text("{}")
    trained = TrainConfig(model="ViT-B-32", pretrained=weights)
    for config in (trained, *(TrainConfig(model=f"{kind}:{bert}") for kind in ("hf", "local-dir"))):
        (note,) = weight_notes(config)
        assert "has weights, but --lr 0.001 is meant for random ones" in note
        assert weight_notes(replace(config, lr=1e-4)) == []
    assert weight_notes(replace(trained, lock_image=True)) == []  # the other tower is random
    for name in ("ViT-B-32", f"hf:{tmp_path}", "mine:towers"):
        assert weight_notes(TrainConfig(model=name)) == []
    (note,) = weight_notes(TrainConfig(model=f"local-dir:{tmp_path}"))
    assert note.endswith("has no weights: they start random")


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
