"""Evaluation during training: its figures, its checkpoints, and training that takes no notice."""

from __future__ import annotations

import json
import random
import signal
from dataclasses import replace

import numpy as np
import pytest
import torch
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megabatch.cli import main
from megabatch.evaluation import evaluate_run
from megabatch.training import TrainConfig, train
from megabatch.training.evaluating import evaluate, figures
from megabatch.training.trackers import Trackers
from megabatch.training.world import World
from tests.process_state import changed
from tests.training.runs import checkpoints, logged, losses, signal_after, weights

METRIC = "pairs/image_to_text/recall@1"
DEVICE = torch.device("cpu")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, straight: TrainConfig) -> TrainConfig:
    """The straight run once more, evaluated every 4 steps, interrupted after the evaluation at 8.

    It stops as late as a signal can, and so evaluates step 8 again when it is resumed.
    """
    config = replace(
        straight,
        output=tmp_path_factory.mktemp("runs") / "validated",
        val_data=straight.train_data,
        val_frequency=4,
        checkpoint_every=0,
        keep_checkpoints=9,
    )
    with changed("threads", 1), pytest.MonkeyPatch.context() as patch:
        signal_after(patch, 7, signal.SIGINT)
        assert train(config) == 130
        assert train(replace(config, resume=True)) == 0
    return config


def test_evaluations_are_those_of_the_checkpoints_and_training_takes_no_notice(
    run: TrainConfig, straight: TrainConfig
) -> None:
    assert weights(run.output) == weights(straight.output)
    assert losses(run.output) == losses(straight.output)
    assert checkpoints(run.output) == [f"step-{step:08d}" for step in (4, 8, 12)]
    records = logged(run.output, "validation.jsonl")
    assert [record["step"] for record in records] == [4, 8, 8, 12]
    assert records[1] == records[2]
    last = json.loads((run.output / "evaluation.json").read_text())
    assert {"step": 12, "val_data": run.val_data, **figures(last)} == records[-1]
    again = evaluate_run(run.output / "checkpoints/step-00000008", val_data=run.val_data)
    assert {"step": 8, "val_data": run.val_data, **figures(again)} == records[1]
    assert (last["run"]["step"], again["run"]["step"]) == (12, 8)

    board = EventAccumulator(str(run.output / "tensorboard"))
    board.Reload()
    points = {(event.step, event.value) for event in board.Scalars(f"val/{METRIC}")}
    assert points == {(r["step"], float(np.float32(r[METRIC]))) for r in records}
    shown = (run.output / "report.html").read_text()  # it has the last point
    assert main(["report", str(run.output)]) == 0
    assert (run.output / "report.html").read_text() == shown


@pytest.mark.usefixtures("no_report")
def test_evaluating_leaves_the_random_state_as_it_is(run: TrainConfig) -> None:
    def state() -> list[object]:
        return [torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())]

    before = state()
    assert evaluate(run, run.output, 12, World(DEVICE), Console(quiet=True), Trackers())
    assert state() == before
