"""Configurations written to TOML and read back; faulty files."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megabatch.config.file import packaged
from megabatch.config.problems import problems
from megabatch.errors import UsageError
from megabatch.training import TrainConfig, load_config, save_config

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
