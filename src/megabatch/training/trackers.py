"""The records of a run, and trackers that show them: TensorBoard, Weights & Biases, MLflow.

Trackers get the numbers of each logged step (`train/...`) and of each evaluation (`val/...`), and
the latter two the configuration. A tracker never stops a training: the first failure is a warning,
and the run goes on without that tracker.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal, Protocol

from torch.utils.tensorboard import SummaryWriter

from megabatch import files
from megabatch.config.file import to_dict
from megabatch.config.settings import TrainConfig
from megabatch.errors import one_line
from megabatch.imports import MissingLibrary, named_extras

Ended = Literal["finished", "interrupted", "failed"]

_METRICS, _VALIDATION = "metrics.jsonl", "validation.jsonl"
_NO_CURVE = ("step", "epoch", "samples", "seconds", "source")  # x axes of curves; a number
_PROJECT = "megabatch"  # unless WANDB_PROJECT or MLFLOW_EXPERIMENT_NAME has another


class Tracker(Protocol):
    """Receives the numbers of one run. Any method may raise anything."""

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Add a point to each curve, by name."""

    def close(self, ended: Ended) -> None:
        """Send the rest and say how the run ended."""


class TensorBoard:
    """Event files in RUN/tensorboard; points after the resumed step are removed."""

    def __init__(self, config: TrainConfig, resumed_step: int) -> None:
        folder = str(config.output / "tensorboard")
        self._writer = SummaryWriter(folder, purge_step=resumed_step + 1)

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self, ended: Ended) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run of Weights & Biases; its variables (WANDB_MODE, WANDB_ENTITY ...) apply.

    Its files are in RUN/wandb, unless WANDB_DIR names a folder. A step cannot be logged twice:
    steps that a resumed run repeats, with the same numbers, keep their first points.
    """

    def __init__(self, config: TrainConfig, resumed_step: int) -> None:
        import wandb

        self._run = wandb.init(
            id=_own_id(config.output, "wandb", lambda: secrets.token_hex(4)),
            resume="allow",
            project=os.environ.get("WANDB_PROJECT", _PROJECT),
            name=os.environ.get("WANDB_NAME", config.output.name),
            dir=os.environ.get("WANDB_DIR", str(config.output)),
            settings=wandb.Settings(console="off"),  # progress is no log
        )
        self._run.config.update(to_dict(config), allow_val_change=True)

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        if step >= self._run.step:
            self._run.log(dict(values), step=step)

    def close(self, ended: Ended) -> None:
        self._run.finish(exit_code=0 if ended == "finished" else 1)


class Mlflow:
    """A run of MLflow, at MLFLOW_TRACKING_URI or else in RUN/mlflow.db.

    A thread sends the numbers, so that no step waits for a server. A step that a resumed run
    repeats has two points, with the same numbers.
    """

    def __init__(self, config: TrainConfig, resumed_step: int) -> None:
        from mlflow.tracking import MlflowClient

        own = f"sqlite:///{config.output.absolute() / 'mlflow.db'}"
        self._client = MlflowClient(tracking_uri=os.environ.get("MLFLOW_TRACKING_URI") or own)
        self._id = _own_id(config.output, "mlflow", lambda: self._create(config))
        self._client.update_run(self._id, "RUNNING")
        self._sender = ThreadPoolExecutor(1, "megabatch-mlflow")
        self._sent: deque[Future[Any]] = deque()

    def _create(self, config: TrainConfig) -> str:
        from mlflow.entities import Param

        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", _PROJECT)
        known = self._client.get_experiment_by_name(name)
        experiment = known.experiment_id if known else self._client.create_experiment(name)
        run = self._client.create_run(experiment, run_name=config.output.name).info.run_id
        settings = [Param(key, str(value)) for key, value in to_dict(config).items()]
        self._client.log_batch(run, params=settings)
        return str(run)

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """See `Tracker`; raises what went wrong with earlier numbers."""
        from mlflow.entities import Metric

        while self._sent and self._sent[0].done():
            self._sent.popleft().result()
        now = int(time.time() * 1000)
        metrics = [Metric(_mlflow_name(name), values[name], now, step) for name in values]
        self._sent.append(self._sender.submit(self._client.log_batch, self._id, metrics=metrics))

    def close(self, ended: Ended) -> None:
        self._sender.shutdown()
        for sent in self._sent:
            sent.result()
        status = {"finished": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}
        self._client.set_terminated(self._id, status[ended])


def _mlflow_name(name: str) -> str:
    """A name of the few characters that MLflow allows; "@" of recall@1 is not among them."""
    return re.sub(r"[^\w./ -]", "_", name.replace("@", "_at_"))


#: The trackers by their names in `--report-to`.
TRACKERS: dict[str, Callable[[TrainConfig, int], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "mlflow": Mlflow,
}


class Trackers(AbstractContextManager["Trackers"]):
    """The records of a run, on the main rank: metrics.jsonl, validation.jsonl and its trackers.

    RUN/metrics.jsonl has a record per logged step, RUN/validation.jsonl one per evaluation. Records
    of steps after the resumed one, left by a process that was killed, are removed first, as these
    steps are repeated. A tracker that fails is left out from then on.

    A context: at its end all are closed, after an error as failed, otherwise as `ended`.
    """

    def __init__(self) -> None:
        self.ended: Ended = "finished"
        self._open: dict[str, Tracker] = {}
        self._warn: Callable[[str], None] = print
        self._folder: Path | None = None

    def start(self, config: TrainConfig, resumed_step: int, warn: Callable[[str], None]) -> None:
        """Start those that `report_to` names; `warn` is called once for each that fails.

        `resumed_step`: the number of steps done before.
        """
        self._warn, self._folder = warn, config.output
        for path in (self._folder / _METRICS, self._folder / _VALIDATION):
            if path.exists():
                _truncate(path, resumed_step)
        for name in config.report_to:
            with self._attempted(name):
                self._open[name] = TRACKERS[name](config, resumed_step)

    def step(self, record: dict[str, Any]) -> None:
        """Log one step, if started; other processes see the record when this returns.

        Raises:
            OSError: the file cannot be written.
        """
        curves = {f"train/{name}": v for name, v in record.items() if name not in _NO_CURVE}
        self._log(_METRICS, record, curves)

    def validation(self, step: int, val_data: str | None, figures: dict[str, float]) -> None:
        """Log an evaluation. The record names the data, which may change when a run is resumed.

        Raises:
            OSError: the file cannot be written.
        """
        curves = {f"val/{name}": value for name, value in figures.items()}
        self._log(_VALIDATION, {"step": step, "val_data": val_data, **figures}, curves)

    def _log(self, name: str, record: dict[str, Any], curves: Mapping[str, float]) -> None:
        if self._folder is None:
            return
        with (self._folder / name).open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        for tracker in list(self._open):
            with self._attempted(tracker):
                self._open[tracker].scalars(curves, record["step"])

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for name, tracker in list(self._open.items()):
            with self._attempted(name):
                tracker.close(self.ended if kind is None else "failed")

    @contextlib.contextmanager
    def _attempted(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # of whatever kind: it is no reason to stop training
            self._open.pop(name, None)
            self._warn(f"--report-to {name} failed, going on without it: {one_line(error, 200)}")


def problems(config: TrainConfig) -> list[str]:
    """Trackers of the configuration whose libraries are not installed, each with its extra."""
    reasons = []
    # A run leaves a folder "wandb", which can be imported, but has no such module.
    modules = {"wandb": ["wandb.sdk"], "mlflow": ["mlflow.tracking"]}
    if not os.environ.get("MLFLOW_TRACKING_URI"):
        modules["mlflow"] += ["sqlalchemy", "alembic"]  # for the file; mlflow-skinny has neither
    for name in config.report_to:
        try:
            with named_extras("watch"):
                for module in modules.get(name, ()):
                    importlib.import_module(module)
        except MissingLibrary as library:
            reasons.append(f"--report-to {name}: {library}")
    return reasons


def _truncate(path: Path, last_step: int) -> None:
    """Keep the records up to `last_step`; an incomplete last line is removed too."""
    kept = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        with contextlib.suppress(ValueError, KeyError, TypeError):
            if json.loads(line)["step"] <= last_step:
                kept.append(line + "\n")
    files.write_text(path, "".join(kept))


def _own_id(folder: Path, tracker: str, create: Callable[[], str]) -> str:
    """The id of a run in a tracker, which stays the same when the run is resumed."""
    path = folder / f"{tracker}.id"
    if not path.exists():
        files.write_text(path, create())
    return path.read_text(encoding="utf-8")
