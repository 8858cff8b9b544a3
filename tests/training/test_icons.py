"""The packaged configuration for the icons, on a few of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from machinery.icon_set import write_icons
from machinery.iconify import open_package
from megabatch.evaluation import evaluate_run
from megabatch.training import load_config, train
from megabatch.training.setup import build_towers
from tests.benchmarks.machinery.iconify_set import write_folder


@pytest.fixture
def icons(tmp_path: Path) -> Path:
    with open_package(write_folder(tmp_path / "package")) as package:
        write_icons(package, tmp_path / "icons")
    return tmp_path / "icons"


def test_the_model_is_built_as_the_configuration_says() -> None:
    towers = build_towers(load_config("icons"))
    assert towers.eval_transform(Image.new("RGB", (72, 72))).shape == (1, 64, 64)
    assert towers.tokenizer(["home outline"]).shape == (1, 64)


def test_the_configuration_trains_and_its_run_is_evaluated_on_held_out_sets(
    icons: Path, tmp_path: Path
) -> None:
    config = replace(
        load_config("icons"),
        train_data=str(icons / "train"),
        output=tmp_path / "run",
        global_batch_size=4,
        micro_batch_size=2,
        steps=2,
        warmup=1,
        workers=0,
        device="cpu",
        torchcompile=False,  # needs a compiler; tests/training/test_gpu.py has it
    )
    assert train(config) == 0
    evaluation = evaluate_run(tmp_path / "run", val_data=str(icons / "test"))
    assert evaluation["retrieval"]["pairs"]["images"] == 1
    assert evaluation["retrieval"]["pairs"]["skipped"] == {}
