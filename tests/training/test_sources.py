"""Runs on other data than one table of images; what is wrong with data is told beforehand."""

from __future__ import annotations

import csv
import gzip
import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megabatch.cli import main
from megabatch.config.settings import TrainConfig
from megabatch.errors import UsageError
from megabatch.models import create
from megabatch.training import train
from megabatch.training.setup import data_for_plan, open_data, prepare
from tests.data.samples import sample, write_tar
from tests.models.tiny_bert import save_tiny_bert
from tests.training.conftest import MakeConfig
from tests.training.runs import logged, losses, weights


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an encoder, bert/, and 20 and 10 pairs of texts, a.csv and b.jsonl.gz."""
    folder = tmp_path_factory.mktemp("texts")
    save_tiny_bert(folder / "bert")
    draw = random.Random(0)
    texts = [" ".join(draw.choices("abcdefg", k=4)) for _ in range(30)]
    with (folder / "a.csv").open("w", newline="") as file:
        rows = [[f"{text} a", f"{text} h"] for text in texts[:20]]
        csv.writer(file).writerows([["asked", "found"], *rows])
    lines = [json.dumps({"asked": f"{text} a", "found": f"{text} h"}) for text in texts[20:]]
    (folder / "b.jsonl.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    return folder


def command(texts: Path, output: Path, *more: str) -> list[str]:
    """Train for 12 steps, of which an epoch has 5."""
    data = f"{texts / 'a.csv'}::{texts / 'b.jsonl.gz'}"
    paths = ["--model", f"hf:{texts / 'bert'}", "--train-data", data, "--output", str(output)]
    options = """
        --train-data-upsampling-factors 1::2 --csv-query-key asked --csv-caption-key found
        --duplicates positives --global-batch-size 8 --micro-batch-size 4 --lr 0.005 --warmup 2
        --steps 12 --checkpoint-every 4 --keep-checkpoints 9 --precision fp32 --device cpu
        --plan off
    """
    return ["train", *paths, *options.split(), *more]


ONE_SOURCE = ["--train-data-batches=one-source", "--query-prefix=a : ::b c : "]


@pytest.mark.parametrize("more", [[], ONE_SOURCE], ids=["mixed", "one-source"])
def test_pairs_of_texts_are_learnt_and_a_resumed_run_is_the_uninterrupted_one(
    texts: Path,
    tmp_path_factory: pytest.TempPathFactory,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    more: list[str],
) -> None:
    straight = tmp_path_factory.mktemp("straight")
    assert main(command(texts, straight, *more)) == 0
    found = losses(straight)
    assert len(found) == 12
    assert sum(found[-3:]) < 0.8 * sum(found[:3])
    kept = Path("checkpoints/step-00000008")  # in the second epoch
    shutil.copytree(straight / kept, tmp_path / kept)
    shutil.copy(straight / "config.toml", tmp_path)
    assert main(command(texts, tmp_path, *more, "--resume")) == 0
    assert weights(tmp_path) == weights(straight)
    if not more:
        assert "source" not in logged(straight)[0]
        return
    sources = [record["source"] for record in logged(straight)]
    assert [sources[i : i + 4].count(1) for i in (0, 4, 8)] == [2] * 3  # of 4 batches an epoch
    assert logged(straight)[0][f"loss_of_source_{sources[0]}"] == found[0]
    assert main(command(texts, tmp_path, *more[:1], "--query-prefix", "x", "--resume")) == 2
    assert "--query-prefix was a : ::b c : , is x" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--csv-query-key", "question"], "a.csv has no query column 'question'"),
        (["--csv-caption-key", "nope"], "a.csv has no caption column 'nope'; its columns are 'as"),
        (["--csv-img-key", "x"], "--csv-query-key asked: expected without --csv-img-key"),
        (
            ["--train-data-upsampling-factors", "1"],
            "--train-data-upsampling-factors: '1'; expected 2 numbers above 0, one for each source",
        ),
        (["--global-batch-size", "41"], "--global-batch-size 41: expected at most 40, the pairs"),
        (
            ["--train-data-batches", "one-source", "--global-batch-size", "11"],
            "b.jsonl.gz in an epoch, as each batch is from one source",
        ),
        (["--model", "glyph-small"], "takes images with texts, but"),
    ],
)
def test_what_cannot_be_is_told_in_one_line(
    texts: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    expected: str,
) -> None:
    assert main(command(texts, tmp_path / "run", *options)) == 2
    error = capsys.readouterr().err
    assert expected in error
    assert error.replace("several things:\n  - ", "").startswith("megabatch train: --")
    assert error.startswith("megabatch train: ")
    assert "Traceback" not in error
    assert not (tmp_path / "run").exists()


def test_a_plan_counts_the_longest_source_with_its_prefix(texts: Path, tmp_path: Path) -> None:
    towers = create(f"hf:{texts / 'bert'}")

    def mean(**more: Any) -> float:
        config = TrainConfig(
            train_data=f"{texts / 'a.csv'}::{texts / 'b.jsonl.gz'}",
            csv_query_key="asked",
            csv_caption_key="found",
            caption_prefix="::a b c ",
            **more,
        )
        return float(np.mean(data_for_plan(config, open_data(config), towers)[1].samples["text"]))

    assert (mean(), mean(train_data_batches="one-source")) == (8, 10)


def test_a_model_of_texts_on_images(texts: Path, make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config(tmp_path / "run", model=f"hf:{texts / 'bert'}")
    with pytest.raises(UsageError, match=r"but .* has images \(--csv-query-key names the column"):
        prepare(config)


def test_an_epoch_is_what_the_factors_say(
    make_config: MakeConfig, pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mixed = {
        "train_data": f"{pictures}::{pictures}",
        "train_data_upsampling_factors": "1::0.4",
        "steps": None,
        "epochs": 2,
        "checkpoint_every": 0,
    }
    assert prepare(make_config(tmp_path / "run", **mixed)).total_steps == 2 * (40 + 16) // 8
    assert train(make_config(tmp_path / "run", **{**mixed, "epochs": 1})) == 0
    told = capsys.readouterr().out
    assert f"{pictures}: 40 pairs, of which an epoch draws 16 (28.6%)\n" in told
    other = make_config(
        tmp_path / "run", **{**mixed, "train_data_upsampling_factors": "1::0.6"}, resume=True
    )
    with pytest.raises(UsageError, match=r"-upsampling-factors was 1::0\.4, is 1::0\.6"):
        train(other)


def test_damage_is_told_before_the_first_step_and_where_there_are_too_few_pairs(
    make_config: MakeConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A shard breaks off in the tenth of twenty samples."""
    members = [member for i in range(20) for member in sample(f"{i:04}", i, f"caption {i}")]
    cut = write_tar(tmp_path / "cut.tar", members)
    os.truncate(cut, cut.read_bytes().index(b"0009.png") + 530)
    damage = f"damaged: {cut}: breaks off inside 0009.png"
    assert train(make_config(tmp_path / "run", train_data=str(cut), steps=1, warmup=0)) == 0
    before = capsys.readouterr().out.partition("step 1/1")[0]
    assert damage in before
    assert "used up to there (10 samples)" in before
    with pytest.raises(UsageError, match=r"global.batch.size.* 10\b") as caught:
        train(make_config(tmp_path / "other", train_data=str(cut), global_batch_size=16))
    assert damage in str(caught.value)
