"""Configurations written to TOML and read back; faulty files."""

from __future__ import annotations

from dataclasses import replace
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
        grad_clip_norm=st.none() | positive,
        precision=st.sampled_from(["fp32", "bf16", "fp16"]),
        evaluate=st.booleans(),
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


def test_packaged_configurations_are_possible_and_keep_what_they_promise() -> None:
    assert "quickstart" in packaged()
    for name in packaged():
        assert problems(load_config(name)) == []
    quickstart = load_config("quickstart")
    assert quickstart.global_batch_size >= 4096
    assert quickstart.micro_batch_size <= 512
    assert quickstart.train_data == "glyphs"
    assert quickstart.evaluate
    icons = load_config(Path("benchmarks/icons.toml"), trust=True)
    assert icons.global_batch_size >= 32_768
    assert icons.duplicates == "positives"


def test_a_file_may_leave_fields_out_and_whole_numbers_serve_as_numbers(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text('lr = 1\noutput = "somewhere"\n')
    assert load_config(path) == replace(TrainConfig(), lr=1, output=Path("somewhere"))


def test_all_faults_of_a_file_come_at_once(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text(
        'learning_rate = 1.0\nglobal_batchsize = 4\nseed = "x"\nprecision = "int8"\noutput = ""\n'
    )
    with pytest.raises(UsageError) as caught:
        load_config(path)
    message = str(caught.value)
    assert "learning_rate is not a setting" in message
    assert "global_batchsize is not a setting; did you mean global_batch_size?" in message
    assert "seed = 'x': expected a whole number" in message
    assert "precision = 'int8': expected 'fp32' or 'bf16' or 'fp16'" in message
    assert "output = '': expected a path" in message


@pytest.mark.parametrize("content", [b"lr = = 1", b"\xff\xfe", b"[model]\nname = 1\n"])
def test_a_file_that_is_no_configuration_is_named(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "broken.toml"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=r"broken\.toml"):
        load_config(path)


def test_a_name_that_is_no_file_says_which_names_there_are() -> None:
    with pytest.raises(UsageError, match="neither a file nor one of quickstart"):
        load_config("quickstrat")
    with pytest.raises(UsageError, match="cannot be read"):
        load_config("/")
