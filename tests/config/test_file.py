"""Configurations written to TOML and read back, from options and files; faulty files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megabatch.cli import main
from megabatch.config.file import packaged, parse
from megabatch.config.problems import problems
from megabatch.errors import UsageError
from megabatch.training import TrainConfig, load_config, save_config
from megabatch.training.setup import weight_notes
from tests.models.tiny_bert import save_tiny_bert
from tests.training.conftest import MakeConfig
from tests.training.runs import weights

texts = st.text(st.characters(codec="utf-8"))
positive = st.floats(min_value=0, exclude_min=True, allow_infinity=False, allow_nan=False)


@settings(max_examples=25)
@given(
    config=st.builds(
        TrainConfig,
        model=texts,
        train_data=texts,
        output=st.just(Path('a "b" \\ ü/run')),
        pretrained=st.none() | st.just(Path("w.safetensors")),
        csv_separator=st.none() | texts,
        global_batch_size=st.integers(1, 2**40),
        steps=st.none() | st.integers(1, 10**9),
        lr=positive,
        eps=positive,
        init_logit_bias=st.none() | st.floats(-1e9, 1e9),
        precision=st.sampled_from(["fp32", "bf16", "fp16"]),
        trim_texts=st.booleans(),
        torchcompile=st.none() | st.booleans(),
        matryoshka_dims=st.lists(st.integers(1)).map(tuple),
    )
)
def test_what_is_saved_is_what_is_read(
    config: TrainConfig, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("toml") / "config.toml"
    save_config(config, path)
    assert load_config(path) == config
    assert [p.name for p in path.parent.iterdir()] == ["config.toml"]


def test_resume_is_not_saved(tmp_path: Path) -> None:
    save_config(TrainConfig(resume=True), tmp_path / "config.toml")
    assert load_config(tmp_path / "config.toml") == TrainConfig()


def test_configurations_that_are_shown_are_possible_and_keep_what_they_promise() -> None:
    assert packaged() == ["quickstart"]
    quickstart, icons = load_config("quickstart"), load_config("benchmarks/icons.toml", trust=True)
    for config in (quickstart, icons, *map(load_config, Path("examples").glob("*/*.toml"))):
        assert problems(config, "model", "train_data") == []
    assert quickstart.global_batch_size >= 4096
    assert icons.global_batch_size >= 32_768


def test_whole_numbers_serve_as_numbers_and_the_rest_are_defaults(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text('lr = 1\noutput = "somewhere"\nreport_to = []\n')
    assert load_config(path) == TrainConfig(lr=1, output=Path("somewhere"), report_to=())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"batch_size = 4\nlearning_rat = 1", "--batch-size: no such option; use --global-batch-s"),
        (b"global_batchsize = 4", "--global-batchsize: no such option; did you mean --global-batc"),
        (b'seed = "x"', "--seed x: expected a whole number"),
        (b'precision = "int8"', "--precision int8: expected 'fp32' or 'bf16' or 'fp16'"),
        (b'output = ""', "--output : expected a path"),
        (b"help = true", "--help: no such option; "),
        (b"lr = true", "--lr: expected one argument"),
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
    assert (
        str(caught.value)
        .replace("several things:\n  - ", "")
        .startswith(f"--config {path}: {message}")
    )


def test_a_name_that_is_no_file_says_which_names_there_are() -> None:
    with pytest.raises(UsageError, match="expected a file or quickstart; did you mean quicks"):
        load_config("quickstrat")
    with pytest.raises(UsageError, match="cannot be read"):
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
