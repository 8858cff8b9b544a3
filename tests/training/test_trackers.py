"""Weights & Biases and MLflow, the real ones without a network, and trackers that fail."""

from __future__ import annotations

import json
import shutil
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from megabatch.training import TrainConfig, load_config, trackers, train
from megabatch.training.trackers import Trackers
from tests.training.conftest import MakeConfig
from tests.training.runs import logged, signal_after, weights


@pytest.fixture(autouse=True)
def _without_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    for name in ("WANDB_PROJECT", "WANDB_NAME", "WANDB_DIR", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)


class WandbSpy:
    """The real library, which writes files for its server, and what is given to it."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        import wandb

        self.runs: list[Any] = []
        self.points: list[tuple[int, dict[str, float]]] = []
        init, log = wandb.init, wandb.Run.log

        def keep_run(**options: Any) -> Any:
            self.runs.append(init(**options))
            return self.runs[-1]

        def keep_points(run: Any, values: dict[str, float], step: int) -> None:
            self.points.append((step, values))
            log(run, values, step=step)

        patch.setattr(wandb, "init", keep_run)
        patch.setattr(wandb.Run, "log", keep_points)

    def curve(self, name: str) -> list[tuple[int, float]]:
        return sorted({(step, values[name]) for step, values in self.points if name in values})


@pytest.mark.usefixtures("no_report")
def test_a_resumed_run_gives_each_tracker_its_curves_and_settings_under_one_id(
    make_config: MakeConfig,
    pictures: Path,
    straight: TrainConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import wandb
    from mlflow.tracking import MlflowClient

    config = make_config(tmp_path / "run", report_to=("wandb", "mlflow"), val_data=str(pictures))
    spy = WandbSpy(monkeypatch)
    with monkeypatch.context() as patch:
        signal_after(patch, 7, signal.SIGINT)
        assert train(config) == 130
    client = MlflowClient(tracking_uri=f"sqlite:///{config.output}/mlflow.db")
    ids = {name: (config.output / f"{name}.id").read_text() for name in config.report_to}
    assert client.get_run(ids["mlflow"]).info.status == "KILLED"
    shutil.rmtree(config.output / "checkpoints/step-00000008")  # two steps are repeated
    assert train(replace(config, resume=True)) == 0
    wandb.teardown()  # ends its process
    assert weights(config.output) == weights(straight.output)
    assert load_config(config.output / "config.toml").report_to == config.report_to
    assert not (config.output / "tensorboard").exists()

    losses = [(record["step"], record["loss"]) for record in logged(config.output)]
    evaluation = json.loads((config.output / "evaluation.json").read_text())
    recall = evaluation["retrieval"]["pairs"]["model"]["image_to_text/recall@1"]
    assert [(run.id, run.project, run.name) for run in spy.runs] == [
        (ids["wandb"], "megabatch", "run")
    ] * 2
    assert spy.runs[0].config["loss"] == "clip"
    assert spy.curve("train/loss") == losses
    assert spy.curve("val/pairs/image_to_text/recall@1") == [(12, recall)]

    run = client.get_run(ids["mlflow"])
    assert (run.info.status, run.data.params["steps"]) == ("FINISHED", "12")
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert sorted({(metric.step, metric.value) for metric in history}) == losses
    (point,) = client.get_metric_history(run.info.run_id, "val/pairs/image_to_text/recall_at_1")
    assert (point.step, point.value) == (12, recall)


def test_trackers_that_fail_are_reported_once_and_training_goes_on(
    make_config: MakeConfig,
    straight: TrainConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def refuse(config: TrainConfig, step: int) -> None:
        raise ValueError("no key")

    failing, sound = mock.Mock(), mock.Mock()
    failing.scalars.side_effect = [None] * 4 + [RuntimeError("the server\nis gone")]
    made = {"wandb": lambda *_: failing, "mlflow": lambda *_: sound}
    monkeypatch.setattr(trackers, "TRACKERS", {"tensorboard": refuse, **made})
    config = make_config(tmp_path / "run", report_to=("tensorboard", "wandb", "mlflow"))
    assert train(config) == 0
    out = capsys.readouterr().out
    for name, reason in (("tensorboard", "no key"), ("wandb", "the server is gone")):
        assert out.count(f"--report-to {name} failed, going on without it: {reason}") == 1
    assert [call.args[1] for call in failing.scalars.mock_calls] == [1, 2, 3, 4, 5]
    assert [call.args[1] for call in sound.scalars.mock_calls] == [*range(1, 13)]
    failing.close.assert_not_called()
    sound.close.assert_called_once_with("finished")
    assert weights(config.output) == weights(straight.output)
    started = Trackers()
    started.start(config, 12, print)
    with pytest.raises(KeyError), started:
        raise KeyError
    sound.close.assert_called_with("failed")


def test_mlflow_reports_what_its_thread_could_not_send(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The numbers go to a server that is set up by MLflow's own variables."""

    def log_batch(run: str, metrics: Any = (), params: Any = ()) -> None:
        assert len(params) <= 100  # as many as a server takes
        if metrics:
            raise ConnectionError(f"no {metrics[0].key}")

    client = mock.Mock(log_batch=log_batch)
    client.get_experiment_by_name.return_value.experiment_id = "1"
    client.create_run.return_value.info.run_id = "the run"
    made = mock.Mock(return_value=client)
    monkeypatch.setattr("mlflow.tracking.MlflowClient", made)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://nowhere.invalid")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "glyphs")
    told: list[str] = []
    with Trackers() as started:
        started.start(TrainConfig(output=tmp_path, report_to=("mlflow",)), 0, told.append)
        started.validation(1, None, {"a@b": 1.0})
    made.assert_called_once_with(tracking_uri="http://nowhere.invalid")
    client.get_experiment_by_name.assert_called_once_with("glyphs")
    client.create_run.assert_called_once_with("1", run_name=tmp_path.name)
    client.update_run.assert_called_once_with("the run", "RUNNING")
    assert told == ["--report-to mlflow failed, going on without it: no val/a_at_b"]


def test_a_folder_of_a_library_s_name_is_no_library(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights & Biases leaves a folder `wandb` behind, which can be imported like a package."""
    (tmp_path / "wandb").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    for name in [name for name in sys.modules if name.partition(".")[0] == "wandb"]:
        monkeypatch.delitem(sys.modules, name)
    config = make_config(tmp_path / "run", report_to=("wandb",))
    (reason,) = trackers.problems(config)
    assert reason.startswith("--report-to wandb: wandb is not installed")
    assert reason.endswith("pip install 'megabatch[watch]'")
    sys.modules.pop("wandb", None)
