"""Small real data and a small real model for runs of a second."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pytest
from PIL import Image

from megabatch.training import TrainConfig, train
from tests.evaluation.conftest import no_report
from tests.planning.conftest import counted_once
from tests.process_state import changed, one_thread

__all__ = ["counted_once", "no_report", "one_thread"]


class MakeConfig(Protocol):
    def __call__(self, output: Path | str, **changes: Any) -> TrainConfig: ...


@pytest.fixture(scope="session")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table of 40 pictures with captions."""
    folder = tmp_path_factory.mktemp("pictures")
    random = np.random.default_rng(0)
    rows = ["filepath,title"]
    for i in range(40):
        Image.fromarray(random.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(
            folder / f"{i}.png"
        )
        rows.append(f"{i}.png,picture number {i}")
    table = folder / "pictures.csv"
    table.write_text("\n".join(rows) + "\n")
    return table


def short(pictures: Path, output: Path | str, **changes: Any) -> TrainConfig:
    """A short run: 5 steps an epoch."""
    from tests.models.tiny import TINY  # open_clip, which the tests on GPUs do without

    config = TrainConfig(
        model=TINY,
        train_data=str(pictures),
        output=Path(output),
        global_batch_size=8,
        micro_batch_size=4,
        steps=12,
        warmup=2,
        plan="off",  # has tests of its own, and takes longer than these runs
        precision="fp32",
        device="cpu",
        checkpoint_every=3,
        report_to=(),  # a run that is continued waits for TensorBoard's clock
    )
    return replace(config, **changes)


@pytest.fixture
def make_config(pictures: Path) -> MakeConfig:
    """Configurations of short runs."""
    return partial(short, pictures)


@pytest.fixture(scope="session")
def straight(tmp_path_factory: pytest.TempPathFactory, pictures: Path) -> TrainConfig:
    """A run of 12 steps that nothing disturbed."""
    folder = tmp_path_factory.mktemp("runs") / "straight"
    config = short(pictures, folder, report_to=("tensorboard",))
    with changed("threads", 1):
        assert train(config) == 0
    return config
