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
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megabatch.cli import main
from megabatch.errors import CommunicationError, UsageError
from megabatch.evaluation import evaluate_run
from megabatch.ranks import Gone
from megabatch.training import TrainConfig, checkpoint, evaluating, train
from megabatch.training.evaluating import Validation, figures, keep_best
from megabatch.training.setup import prepare
from megabatch.training.trackers import Trackers
from megabatch.training.world import World
from tests.training.conftest import MakeConfig
from tests.training.runs import logged, signal_after, weights

METRIC = "pairs/image_to_text/recall@10"


def validated(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "validation.jsonl").open()]


@pytest.fixture(scope="module")
def run(
    tmp_path_factory: pytest.TempPathFactory, straight: TrainConfig, pictures: Path
) -> TrainConfig:
    """The straight run once more, evaluated every 4 steps, interrupted after step 6."""
    config = replace(
        straight,
        output=tmp_path_factory.mktemp("runs") / "validated",
        val_data=str(pictures),
        val_frequency=4,
        best_metric=METRIC,
        plan="off",
    )
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        signal_after(patch, 5, signal.SIGINT)
        assert train(config) == 130
        assert [record["step"] for record in validated(config.output)] == [4]
        assert train(replace(config, resume=True)) == 0
    torch.set_num_threads(threads)
    return config


def test_training_takes_no_notice(run: TrainConfig, straight: TrainConfig) -> None:
    assert weights(run.output) == weights(straight.output)
    losses = [[r["loss"] for r in logged(config.output)] for config in (run, straight)]
    assert losses[0] == losses[1]


@pytest.mark.usefixtures("no_report")
def test_the_figures_are_those_of_an_evaluation_of_the_same_weights(
    run: TrainConfig, pictures: Path
) -> None:
    records = validated(run.output)
    assert [record["step"] for record in records] == [4, 8, 12]
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


def test_the_report_has_the_last_point(run: TrainConfig) -> None:
    shown = (run.output / "report.html").read_text()
    assert main(["report", str(run.output)]) == 0
    assert (run.output / "report.html").read_text() == shown


def test_the_figures_are_curves(run: TrainConfig) -> None:
    board = EventAccumulator(str(run.output / "tensorboard"))
    board.Reload()
    points = {(event.step, event.value) for event in board.Scalars(f"val/{METRIC}")}
    expected = {(r["step"], float(np.float32(r[METRIC]))) for r in validated(run.output)}
    assert points == expected


def test_evaluating_leaves_the_model_and_the_random_state_as_they_are(
    make_config: MakeConfig, pictures: Path, tmp_path: Path
) -> None:
    config = make_config(tmp_path / "run", val_data=str(pictures), val_frequency=1)
    setup = prepare(config)
    module = setup.towers.module.train()
    state = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[union-attr]
    validation = Validation(setup.config, World(torch.device("cpu")))
    found = validation.figures(module.state_dict())
    after = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[union-attr]
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]
    assert module.training
    assert all(torch.equal(state[name], value) for name, value in module.state_dict().items())
    assert list(found) == validation.names()


def test_a_rank_that_dies_in_an_evaluation_is_told_in_one_line(
    run: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lose(*_: object, **__: object) -> None:
        raise CommunicationError("rank 1 of the group is gone")

    monkeypatch.setattr("megabatch.evaluation.run.score_all", lose)
    monkeypatch.setattr("megabatch.evaluation.evaluate_run", lose)
    monkeypatch.setattr(World, "tensors_from_main", lambda self, tensors: tensors.items())
    world = World(torch.device("cpu"), 0, 2)
    validation = Validation(run, world)
    with pytest.raises(Gone, match="rank 0 of 2, evaluating: another process is gone"):
        validation.figures(load_file(run.output / "model.safetensors"))
    with pytest.raises(Gone, match="rank 0 of 2, evaluating: another process is gone"):
        evaluating.evaluate(run, 12, world, Console(quiet=True), Trackers())


def test_an_unknown_metric_is_refused_before_anything_is_trained(
    make_config: MakeConfig, pictures: Path, tmp_path: Path
) -> None:
    config = make_config(
        tmp_path / "run", val_data=str(pictures), val_frequency=5, best_metric="recall@1"
    )
    with pytest.raises(UsageError, match=r"--best-metric recall@1: expected one of pairs/image_to"):
        train(config)
    assert not (config.output / "metrics.jsonl").exists()


def test_what_is_better_and_what_is_not_compared(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("")
    rank, written = "pairs/image_to_text/median_rank", list[Path]()

    def offer(metric: str, data: str | None, *values: float) -> list[bool]:
        return [
            keep_best(tmp_path, (metric, data), value, step, written.append)
            for step, value in enumerate(values)
        ]

    assert offer(rank, None, 9, 12, 9, 3) == [True, False, False, True]
    assert offer(METRIC, None, 0.1, 0.05, 0.2) == [True, False, True]  # of another metric
    (tmp_path / "best/best.json").write_text("{")
    assert offer(METRIC, None, 0.0) == [True]
    assert written == [tmp_path / "best/model.safetensors"] * 5
    assert offer(METRIC, "easy", 0.9) + offer(METRIC, "hard", 0.2, 0.1, 0.3) == [
        *(True, True, False, True)  # of other data
    ]


@pytest.mark.usefixtures("no_report")
def test_a_best_checkpoint_that_cannot_be_written_is_told_and_training_goes_on(
    make_config: MakeConfig,
    straight: TrainConfig,
    pictures: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    original = checkpoint.save_tensors

    def save_tensors(tensors: dict[str, torch.Tensor], path: Path) -> None:
        if "best" in path.parts:
            raise OSError(28, "No space left on device")
        original(tensors, path)

    monkeypatch.setattr(checkpoint, "save_tensors", save_tensors)
    config = make_config(tmp_path / "run", val_data=str(pictures), val_frequency=11)
    assert train(config) == 0
    told = "the evaluation of step 11 could not be written: No space left on device; training "
    assert f"{told}continues" in capsys.readouterr().out
    assert weights(config.output) == weights(straight.output)
    assert json.loads((config.output / "best/best.json").read_text())["step"] == 12
