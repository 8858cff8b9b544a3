"""Evaluation during training: its figures, the best weights, and training that takes no notice."""

from __future__ import annotations

import json
import random
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megabatch.cli import main
from megabatch.errors import CommunicationError
from megabatch.evaluation import evaluate_run
from megabatch.ranks import Gone
from megabatch.training import TrainConfig, train
from megabatch.training.evaluating import evaluate, figures, keep_best
from megabatch.training.trackers import Trackers
from megabatch.training.world import World
from tests.training.runs import logged, signal_after, weights

METRIC = "pairs/image_to_text/recall@1"


def validated(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "validation.jsonl").open()]


@pytest.fixture(scope="module")
def run(
    tmp_path_factory: pytest.TempPathFactory, straight: TrainConfig, pictures: Path
) -> TrainConfig:
    """The straight run once more, evaluated every 3 steps, interrupted after step 7."""
    config = replace(
        straight,
        output=tmp_path_factory.mktemp("runs") / "validated",
        val_data=str(pictures),
        val_frequency=3,
        plan="off",
    )
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        signal_after(patch, 6, signal.SIGINT)
        assert train(config) == 130
        assert [record["step"] for record in validated(config.output)] == [3, 6]
        assert train(replace(config, resume=True)) == 0
    torch.set_num_threads(threads)
    return config


def test_training_takes_no_notice(run: TrainConfig, straight: TrainConfig) -> None:
    assert weights(run.output) == weights(straight.output)
    losses = [[r["loss"] for r in logged(config.output)] for config in (run, straight)]
    assert losses[0] == losses[1]
    assert not (run.output / "validation").exists()


@pytest.mark.usefixtures("no_report")
def test_the_figures_are_those_of_an_evaluation_of_the_same_weights(
    run: TrainConfig, pictures: Path
) -> None:
    records = validated(run.output)
    assert [record["step"] for record in records] == [3, 6, 9, 12]
    last = json.loads((run.output / "evaluation.json").read_text())
    assert {"step": 12, "val_data": str(pictures), **figures(last)} == records[-1]
    assert last["run"]["step"] == 12
    best = json.loads((run.output / "best/best.json").read_text())
    top = max(records, key=lambda record: record[METRIC])  # the first of equal ones
    of = {"metric": METRIC, "val_data": str(pictures)}
    assert best == {**of, "value": top[METRIC], "step": top["step"]}
    again = evaluate_run(run.output / "best", val_data=str(pictures))
    assert {"step": top["step"], "val_data": str(pictures), **figures(again)} == top
    assert again["run"]["step"] == top["step"]


def test_the_figures_are_curves_and_the_report_has_the_last_point(run: TrainConfig) -> None:
    board = EventAccumulator(str(run.output / "tensorboard"))
    board.Reload()
    points = {(event.step, event.value) for event in board.Scalars(f"val/{METRIC}")}
    expected = {(r["step"], float(np.float32(r[METRIC]))) for r in validated(run.output)}
    assert points == expected
    shown = (run.output / "report.html").read_text()
    assert main(["report", str(run.output)]) == 0
    assert (run.output / "report.html").read_text() == shown


@pytest.mark.usefixtures("no_report")
def test_evaluating_leaves_the_random_state_as_it_is(run: TrainConfig) -> None:
    def state() -> list[object]:
        return [torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())]

    before = state()
    alone = World(torch.device("cpu"))
    assert evaluate(run, run.output, 12, alone, Console(quiet=True), Trackers())
    assert state() == before


def test_a_rank_that_dies_in_an_evaluation_is_told_in_one_line(
    run: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lose(*_: object, **__: object) -> None:
        raise CommunicationError("rank 1 of the group is gone")

    monkeypatch.setattr("megabatch.evaluation.evaluate_run", lose)
    monkeypatch.setattr(World, "gather", lambda self, value: [value, value])
    two = World(torch.device("cpu"), 0, 2)
    with pytest.raises(Gone, match="rank 0 of 2, evaluating: another process is gone"):
        evaluate(run, run.output, 12, two, Console(quiet=True), Trackers())


def test_what_is_better_and_what_is_not_compared(tmp_path: Path) -> None:
    for name in ("config.toml", "model.safetensors"):
        (tmp_path / name).write_text("")

    def offer(data: str | None, *values: float) -> list[str]:
        return [
            keep_best(tmp_path, tmp_path, step, data, {METRIC: value, "other": 1 - value})
            for step, value in enumerate(values)
        ]

    assert offer(None, 0.1, 0.05, 0.1, 0.2) == [METRIC, "", "", METRIC]
    (tmp_path / "best/best.json").write_text("{")
    assert offer(None, 0.0) == [METRIC]
    assert offer("easy", 0.9) + offer("hard", 0.2, 0.1, 0.3) == [METRIC, METRIC, "", METRIC]
