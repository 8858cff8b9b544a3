"""Weights & Biases and MLflow, the real ones without a network, and trackers that fail."""

from __future__ import annotations

import json
import shutil
import signal
import struct
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

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


def offline_records(run: Path) -> list[Any]:
    """What the offline runs in a folder hold for the server, in the order of writing.

    The files are logs as LevelDB's: blocks of 32 KiB, in them pieces of records, each after its
    checksum, size and kind (whole, first, middle, last).
    """
    import wandb
    from wandb.proto.wandb_internal_pb2 import Record

    wandb.teardown()  # waits for the process that writes them, as the end of a program does
    found = []
    for path in sorted(run.glob("wandb/offline-run-*/*.wandb")):
        data, at, record = path.read_bytes(), 7, b""
        while at + 7 <= len(data):
            if (room := 32768 - at % 32768) < 7:
                at += room
                continue
            _, size, kind = struct.unpack_from("<IHB", data, at)
            record += data[at + 7 : at + 7 + size]
            at += 7 + size
            if kind in (1, 4):
                found.append(Record.FromString(record))
                record = b""
    return found


def curves_of(records: list[Any]) -> dict[str, list[tuple[int, float]]]:
    """Each curve's (step, value)s."""
    found: dict[str, list[tuple[int, float]]] = {}
    for record in records:
        if record.HasField("history"):
            for item in record.history.item:
                name = item.key or "/".join(item.nested_key)
                point = (record.history.step.num, json.loads(item.value_json))
                found.setdefault(name, []).append(point)
    return found


def test_event_files_are_in_the_order_of_their_runs(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    config = make_config(tmp_path / "run")
    folder = config.output / "tensorboard"
    folder.mkdir(parents=True)
    earlier = folder / f"events.out.tfevents.{int(time.time()):010d}.~"  # after any host's name
    earlier.touch()
    trackers.TensorBoard(config, 0).close("finished")
    assert min(folder.iterdir()) == earlier


@pytest.mark.usefixtures("no_report")
def test_a_resumed_run_gives_each_tracker_its_curves_and_settings_under_one_id(
    make_config: MakeConfig,
    pictures: Path,
    straight: TrainConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from mlflow.tracking import MlflowClient

    config = make_config(tmp_path / "run", report_to=("wandb", "mlflow"), val_data=str(pictures))
    with monkeypatch.context() as patch:
        signal_after(patch, 7, signal.SIGINT)
        assert train(config) == 130
    client = MlflowClient(tracking_uri=f"sqlite:///{config.output}/mlflow.db")
    ids = json.loads((config.output / "trackers.json").read_text())
    assert client.get_run(ids["mlflow"]).info.status == "KILLED"
    shutil.rmtree(config.output / "checkpoints/step-00000008")  # two steps are repeated
    assert train(replace(config, resume=True)) == 0
    assert weights(config.output) == weights(straight.output)
    assert json.loads((config.output / "trackers.json").read_text()) == ids
    assert load_config(config.output / "config.toml").report_to == config.report_to
    assert not (config.output / "tensorboard").exists()
    check_weights_and_biases(config.output, ids["wandb"])
    check_mlflow(config.output, client.get_run(ids["mlflow"]), client)


def check_weights_and_biases(folder: Path, run_id: str) -> None:
    records = offline_records(folder)
    runs = [record.run for record in records if record.HasField("run")]
    assert [(run.run_id, run.project) for run in runs] == [(run_id, "megabatch")] * 2
    assert [run.display_name for run in runs] == [folder.name] * 2
    updates = [u for record in records for u in (*record.config.update, *record.run.config.update)]
    told = {update.key: update.value_json for update in updates}
    assert (told["global_batch_size"], told["loss"]) == ("8", '"clip"')
    curves = curves_of(records)
    for name in ("loss", "grad_norm", "logit_scale"):
        # Only the server knows, in which steps a resumed run has points already.
        points = sorted(set(curves[f"train/{name}"]))
        assert points == [(r["step"], r[name]) for r in logged(folder)]
    evaluation = json.loads((folder / "evaluation.json").read_text())
    recall = evaluation["retrieval"]["pairs"]["model"]["image_to_text/recall@1"]
    assert curves["val/pairs/image_to_text/recall@1"] == [(12, recall)]


def check_mlflow(folder: Path, run: Any, client: Any) -> None:
    assert run.info.status == "FINISHED"
    assert run.data.params["steps"] == "12"
    history = client.get_metric_history(run.info.run_id, "train/loss")
    losses = [(record["step"], record["loss"]) for record in logged(folder)]
    assert sorted((metric.step, metric.value) for metric in history) == losses
    (recall,) = client.get_metric_history(run.info.run_id, "val/pairs/image_to_text/recall_at_1")
    assert recall.step == 12


class Recorder:
    """A tracker that fails from a step on."""

    def __init__(self, fails_at: int) -> None:
        self.fails_at = fails_at
        self.steps: list[int] = []
        self.ended = ""

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        if step >= self.fails_at:
            raise RuntimeError("the server\nis gone")
        self.steps.append(step)

    def close(self, ended: str) -> None:
        self.ended = ended


def test_trackers_that_fail_are_reported_once_and_training_goes_on(
    make_config: MakeConfig,
    straight: TrainConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def refuse(config: TrainConfig, step: int) -> Recorder:
        raise ValueError("no key")

    failing, sound = Recorder(5), Recorder(1000)
    monkeypatch.setitem(trackers.TRACKERS, "tensorboard", refuse)
    monkeypatch.setitem(trackers.TRACKERS, "wandb", lambda config, step: failing)
    monkeypatch.setitem(trackers.TRACKERS, "mlflow", lambda config, step: sound)
    config = make_config(tmp_path / "run", report_to=("tensorboard", "wandb", "mlflow"))
    assert train(config) == 0
    out = capsys.readouterr().out
    for name, reason in (("tensorboard", "no key"), ("wandb", "the server is gone")):
        assert out.count(f"--report-to {name} failed, going on without it: {reason}") == 1
    assert (failing.steps, failing.ended) == ([1, 2, 3, 4], "")
    assert (sound.steps, sound.ended) == (list(range(1, 13)), "finished")
    assert weights(config.output) == weights(straight.output)
    sound.ended = ""
    started = Trackers()
    started.start(config, 12, print)
    with pytest.raises(KeyError), started:
        raise KeyError
    assert sound.ended == "failed"


def test_mlflow_reports_what_its_thread_could_not_send(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The numbers go to a server that is set up by MLflow's own variables."""
    from mlflow.entities import Run, RunData, RunInfo

    class Client:
        def __init__(self, tracking_uri: str) -> None:
            sent.append(tracking_uri)

        def get_experiment_by_name(self, name: str) -> SimpleNamespace:
            return SimpleNamespace(experiment_id=name)

        def create_run(self, experiment: str, run_name: str) -> SimpleNamespace:
            return SimpleNamespace(info=SimpleNamespace(run_id=f"{experiment}/{run_name}"))

        def update_run(self, run: str, status: str) -> None:
            sent.append((run, status))

        def get_run(self, run: str) -> Run:
            return Run(RunInfo(run, "0", "me", "RUNNING", 0, None, "active"), RunData())

        def log_batch(self, run: str, metrics: Any = (), params: Any = ()) -> None:
            assert len(params) <= 100  # as many as a server takes
            if metrics:
                raise ConnectionError(f"no {metrics[0].key}")

    sent: list[Any] = []
    monkeypatch.setattr("mlflow.tracking.MlflowClient", Client)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://nowhere.invalid")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "glyphs")
    told: list[str] = []
    with Trackers() as started:
        started.start(TrainConfig(output=tmp_path, report_to=("mlflow",)), 0, told.append)
        started.validation(1, None, {"a@b": 1.0})
    assert sent == ["http://nowhere.invalid", (f"glyphs/{tmp_path.name}", "RUNNING")]
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
