"""The files that a report is made from: an evaluation's, and its run's."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megabatch.errors import UsageError, one_line
from megabatch.evaluation.config import read_config
from megabatch.evaluation.report.content import Content, load
from megabatch.evaluation.run_folder import read_metrics


@dataclass(frozen=True)
class Source:
    """Everything that is known about a run or an evaluated model, whatever of it exists.

    settings, config: the run's config.toml, as a dictionary and as text; empty without a run.
    records: the logged steps; validation: figures of evaluations during the training. evaluation:
    the content of evaluation.json, {} if there is none; content: that of report.json.
    """

    name: str
    settings: dict[str, Any]
    config: str
    records: list[dict[str, Any]]
    validation: list[dict[str, Any]]
    evaluation: dict[str, Any]
    content: Content | None

    @property
    def evaluated_step(self) -> int | None:
        """The step whose weights were evaluated; None if that is not known."""
        step = self.evaluation.get("run", {}).get("step")
        return step if isinstance(step, int) else None

    @property
    def last_step(self) -> int:
        """The last logged step, 0 without a log."""
        return self.records[-1]["step"] if self.records else 0

    @property
    def outdated(self) -> str:
        """A remark on the steps of the evaluation and of the log; "" if the run did not go on."""
        step = self.evaluated_step
        if step is None or step >= self.last_step:
            return ""
        return f"evaluated at step {step:,}, trained to step {self.last_step:,}"


def read_source(folder: Path) -> Source:
    """Read a run's folder, or the folder that an evaluation was written to.

    Raises:
        UsageError: it is neither, or a file in it is damaged.
    """
    evaluation = _read_evaluation(folder)
    content = load(folder) if evaluation else None
    run = folder
    if content is not None and content.run is not None:
        elsewhere = folder / content.run
        run = elsewhere if (elsewhere / "config.toml").is_file() else folder
    is_run = (run / "config.toml").is_file()
    if not is_run and not evaluation:
        if not folder.is_dir():
            raise UsageError(f"{folder} is not a folder")
        raise UsageError(f"{folder} is not a run: it has neither config.toml nor evaluation.json")
    name = run.resolve().name
    if not is_run:
        name = str(evaluation["run"].get("model", folder.resolve().name))
    return Source(
        name,
        read_config(run) if is_run else {},
        (run / "config.toml").read_text(encoding="utf-8") if is_run else "",
        read_metrics(run / "metrics.jsonl"),
        read_metrics(run / "validation.jsonl"),
        evaluation,
        content,
    )


def distinct_names(sources: Sequence[Source], folders: Sequence[Path]) -> list[str]:
    """The sources' names, preceded by folders above if several have the same one."""
    names = [source.name for source in sources]
    above = [folder.resolve().parts for folder in folders]
    for depth in range(2, 1 + max(map(len, above))):
        twice = {name for name in names if names.count(name) > 1}
        if not twice:
            break
        names = [
            "/".join(parts[-depth:]).replace("//", "/") if name in twice else name
            for name, parts in zip(names, above, strict=True)
        ]
    return names


def _read_evaluation(folder: Path) -> dict[str, Any]:
    path = folder / "evaluation.json"
    if not path.is_file():
        return {}
    try:
        evaluation = json.loads(path.read_text(encoding="utf-8"))
        for key in ("run", "retrieval", "zero_shot"):
            if not isinstance(evaluation[key], dict):
                raise TypeError(f"{key} is not a table")
        str(evaluation["date"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path} cannot be read: {one_line(error, 200)}") from error
    return dict(evaluation)
