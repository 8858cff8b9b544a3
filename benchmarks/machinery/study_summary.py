"""Means and deviations of batch_study.py's records, by arm and size."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from machinery.study_plan import ARMS, TUNING_SEED, Record, Series


@dataclass(frozen=True)
class Point:
    """The runs of one size of an arm; they differ in their seeds alone.

    size: pairs that meet in the loss.
    stopped: how many diverged; they are in no figure.
    """

    data: str
    loss: str
    arm: str
    size: int
    steps: int
    lr: float
    runs: list[Record]
    stopped: int

    def figure(self, test: str, name: str = "recall@10") -> tuple[float, float]:
        """The mean over seeds, and the sample's standard deviation (0 for one)."""
        return mean_and_deviation([run["tests"][test][name] for run in self.runs])

    def last_loss(self) -> tuple[float, float]:
        """The same of the training loss in the last part of a run."""
        return mean_and_deviation([run["losses"][-1] for run in self.runs])


def mean_and_deviation(values: list[float]) -> tuple[float, float]:
    """The mean, and the sample's standard deviation (0 for one)."""
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def points(content: dict[str, Any]) -> Iterator[Point]:
    """The points of a study that have a run."""
    study = [record for record in content["records"] if record["seed"] != TUNING_SEED]
    for one in content["series"]:
        series = Series(one["data"], one["loss"], tuple(one["sizes"]), one["samples"])
        for arm in ARMS:
            for size, batch, group, steps in series.points(arm):
                wanted = {
                    **{"data": series.data, "loss": series.loss},
                    **{"batch": batch, "group": group, "steps": steps},
                }
                like = [r for r in study if all(r[name] == v for name, v in wanted.items())]
                runs = [record for record in like if "tests" in record]
                if runs:
                    stopped = len(like) - len(runs)
                    yield Point(
                        *(series.data, series.loss, arm, size, steps, runs[0]["lr"], runs, stopped)
                    )


def table(content: dict[str, Any], name: str = "recall@10") -> str:
    """The points as a table in Markdown: a recall in per cent, and the last training loss."""
    tests = ("in_domain", "unseen", "seen")
    titles = ("in-domain test", "unseen family", "seen in training")
    head = ["data", "loss", "arm", "pairs that meet", "steps", "learning rate", "seeds",
            *(f"{title}, {name}" for title in titles), "training loss"]  # fmt: skip
    lines = [head, ["---"] * len(head)]
    for point in points(content):
        recalls = [
            "{:.2f} ± {:.2f}%".format(*(100 * v for v in point.figure(t, name))) for t in tests
        ]
        seeds = str(len(point.runs)) + (f" ({point.stopped} diverged)" if point.stopped else "")
        lines.append(
            [point.data, point.loss, point.arm, f"{point.size:,}", f"{point.steps:,}",
             f"{point.lr:g}", seeds, *recalls, "{:.3f} ± {:.3f}".format(*point.last_loss())]
        )  # fmt: skip
    chances = [
        f"Chance, {name}, {data}: "
        + ", ".join(
            f"{title} {about[t]['chance'][name]:.3%}"
            for t, title in zip(tests, titles, strict=True)
        )
        for data, about in content["tests"].items()
    ]
    return "\n".join([*(f"| {' | '.join(line)} |" for line in lines), "", *chances])
