"""`report.html`: one file with all figures, curves and example queries of an evaluation."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jinja2 import Environment, PackageLoader, StrictUndefined
from PIL import Image

from megabatch.evaluation.charts import Bars, Chart, bars_chart, curves_chart, series
from megabatch.evaluation.retrieval import best_right_columns
from megabatch.evaluation.run_folder import read_metrics, write_atomically
from megabatch.evaluation.table import (
    CONTENDERS,
    WAYS,
    classification_groups,
    direction,
    left_out,
    retrieval_groups,
    zero_shot_groups,
)
from megabatch.evaluation.tasks import KS, Matched
from megabatch.similarity import ranks, topk

_TITLE_LENGTH = 24  # letters of a data set's name in a chart
_LARGEST = 128  # pixels per side of an embedded picture
_SEARCHED = 500  # queries among which failures are sought
_CURVES = {
    "loss": "loss",
    "lr": "learning rate",
    "pairs_per_second": "pairs per second",
    "logit_scale": "logit scale",
}


@dataclass(frozen=True)
class Gallery:
    """The example queries of one task."""

    title: str
    shown_with: str
    examples: list[Query]
    failures: list[Query]


@dataclass(frozen=True)
class Shown:
    """The source of a gallery; `picture_of` and `pictures_are` as in `Task`."""

    title: str
    matched: Matched
    picture_of: Callable[[str], tuple[Image.Image, bool] | None] | None = None
    pictures_are: str = "one of its evaluated images"


def write_report(
    folder: Path, evaluation: dict[str, Any], shown: Sequence[Shown], run: Path | None
) -> Path:
    """Write `folder/report.html` from the evaluation, the run's log and the tasks' features.

    `run`: the run's folder, None for a model without a run.
    """
    html = render(
        name=evaluation["run"]["model"] if run is None else run.resolve().name,
        evaluation=evaluation,
        records=[] if run is None else read_metrics(run / "metrics.jsonl"),
        galleries=[_gallery(s) for s in shown],
        config="" if run is None else (run / "config.toml").read_text(encoding="utf-8"),
    )
    path = folder / "report.html"
    write_atomically(path, html)
    return path


def render(
    *,
    name: str,
    evaluation: dict[str, Any],
    records: list[dict[str, Any]],
    galleries: Sequence[Gallery],
    config: str,
) -> str:
    """Render the page; everything inserted into it is escaped."""
    environment = Environment(
        loader=PackageLoader("megabatch.evaluation", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html").render(
        name=name,
        evaluation=evaluation,
        facts=_facts(evaluation, records),
        recall=_recall_chart(evaluation),
        retrieval=retrieval_groups(evaluation),
        zero_shot=zero_shot_groups(evaluation),
        classification=classification_groups(evaluation),
        by_class=_by_class(evaluation),
        left_out=left_out,
        curves=_training_curves(records),
        galleries=galleries,
        config=config,
    )


def _gallery(shown: Shown) -> Gallery:
    examples, failures = choose_queries(shown.matched, shown.picture_of, examples=8, failures=4)
    return Gallery(shown.title, shown.pictures_are, examples, failures)


def _by_class(evaluation: dict[str, Any]) -> list[tuple[str, list[tuple[str, str]]]]:
    """The classes of each zero-shot task, the worst first; of many, the first and last ten."""
    tables = []
    for task in evaluation["zero_shot"].values():
        recalls = sorted(task.get("recall_by_class", {}).items(), key=lambda item: item[1])
        rows = [(name, f"{100 * recall:.1f}%") for name, recall in recalls]
        if len(rows) > 20:
            rows = [*rows[:10], ("…", ""), *rows[-10:]]
        if rows:
            tables.append((task["title"], rows))
    return tables


def _facts(evaluation: dict[str, Any], records: list[dict[str, Any]]) -> list[tuple[str, str]]:
    run = evaluation["run"]
    facts = [
        ("model", f"{run['model']}, {run['parameters'] / 1e6:.1f} M parameters"),
        *([("training data", str(run["train_data"]))] if run["train_data"] else []),
        ("weights", run["weights"]),
        ("evaluation", f"{evaluation['seconds']:.0f} s on {run['device']}, {run['precision']}"),
    ]
    if records:
        last = records[-1]
        facts.append(("steps", f"{last['step']:,}"))
        for key, term, form in (
            ("epoch", "epochs", "{:.4g}"),
            ("samples", "pairs seen", "{:,.0f}"),
            ("seconds", "training time", "{:,.0f} s"),
            ("loss", "last loss", "{:.4f}"),
        ):
            if isinstance(last.get(key), int | float):
                facts.append((term, form.format(last[key])))
    return facts


def _training_curves(records: list[dict[str, Any]]) -> Chart | None:
    panels = [(title, series(records, key)) for key, title in _CURVES.items()]
    drawn = [(title, curve) for title, curve in panels if curve is not None]
    return curves_chart(drawn) if drawn else None


def _recall_chart(evaluation: dict[str, Any]) -> Chart:
    """Image to text of every task, then the classification tasks, then text to image."""
    retrieval = evaluation["retrieval"].values()
    recalls = [f"recall@{k}" for k in KS]
    classed = [
        *((task, "zero-shot, top k") for task in evaluation["zero_shot"].values()),
        *((task, "trained, top k") for task in evaluation.get("classification", {}).values()),
    ]
    panels = [
        *(
            _panel(
                task, direction(task, WAYS[0], "to"), [f"image_to_text/{r}" for r in recalls], KS
            )
            for task in retrieval
        ),
        *(_panel(task, subtitle, ["top1", "top5"], (1, 5)) for task, subtitle in classed),
        *(
            _panel(
                task, direction(task, WAYS[1], "to"), [f"text_to_image/{r}" for r in recalls], KS
            )
            for task in retrieval
        ),
    ]
    return bars_chart(panels, columns=len(retrieval) + len(classed))


def _panel(task: dict[str, Any], subtitle: str, keys: list[str], ks: Sequence[int]) -> Bars:
    values = {
        name: [task[name][key] for key in keys]
        for name in CONTENDERS
        if keys[0] in task.get(name, {})
    }
    title = task["title"]
    if len(title) > _TITLE_LENGTH:  # a path, whose end is the most specific
        title = "…" + title[1 - _TITLE_LENGTH :]
    return Bars(f"{title}: {subtitle}", [f"@{k}" for k in ks], values)


@dataclass(frozen=True)
class Picture:
    """An image as a data URI; `small` ones are enlarged without smoothing."""

    uri: str
    small: bool


@dataclass(frozen=True)
class Answer:
    """One retrieved text; `known`: whether the training set has it, None if that is unknown."""

    text: str
    picture: Picture | None
    known: bool | None
    right: bool
    cosine: float


@dataclass(frozen=True)
class Query:
    """An image with the texts that score highest; `rank`: of the right text, 1 is best."""

    key: str
    text: str
    picture: Picture
    rank: int
    answers: list[Answer]


def choose_queries(
    matched: Matched,
    picture_of: Callable[[str], tuple[Image.Image, bool] | None] | None = None,
    *,
    examples: int,
    failures: int,
    seed: int = 0,
) -> tuple[list[Query], list[Query]]:
    """Draw queries at random, and further ones among those whose right answer is not the first.

    `picture_of`: as in `Task`.
    """
    order = torch.randperm(len(matched.indices), generator=torch.Generator().manual_seed(seed))
    order = order[: examples + _SEARCHED].to(matched.features.device)
    queries, ids = matched.features[order], matched.image_ids[order]
    target, tied = best_right_columns(queries, matched.text_features, ids, matched.text_ids)
    above, equal = ranks(
        queries, matched.text_features, target, ids=(ids, matched.text_ids), group="local"
    )
    expected = 1 + above + (equal / (tied + 1)).ceil().long()
    ranked = list(zip(order.tolist(), target.tolist(), expected.tolist(), strict=True))
    show = _query_maker(matched, picture_of or _evaluated_picture(matched))
    missed = [query for query in ranked[examples:] if query[2] > 1][:failures]
    return [show(*query) for query in ranked[:examples]], [show(*query) for query in missed]


def _query_maker(
    matched: Matched, picture_of: Callable[[str], tuple[Image.Image, bool | None] | None]
) -> Callable[[int, int, int], Query]:
    """Return a function from an image's position, its best right text and that text's rank."""

    def show(position: int, right: int, rank: int) -> Query:
        sample = matched.samples[matched.indices[position]]
        k = min(5, len(matched.texts))
        cosines, found = topk(
            matched.features[position : position + 1], matched.text_features, k, group="local"
        )
        answers = []
        for cosine, at in zip(cosines[0].tolist(), found[0].tolist(), strict=True):
            drawn = picture_of(matched.texts[at])
            answers.append(
                Answer(
                    text=matched.texts[at],
                    picture=encode(drawn[0]) if drawn else None,
                    known=drawn[1] if drawn else None,
                    right=bool(matched.text_ids[at] == matched.image_ids[position]),
                    cosine=cosine,
                )
            )
        return Query(sample.key, matched.texts[right], encode(sample.image), rank, answers)

    return show


def _evaluated_picture(matched: Matched) -> Callable[[str], tuple[Image.Image, bool | None] | None]:
    """Return a function from a text to its first evaluated image, for data without `picture_of`."""
    first_image: dict[int, int] = {}
    for index, image_id in zip(matched.indices, matched.image_ids.tolist(), strict=True):
        first_image.setdefault(image_id, index)
    text_id = dict(zip(matched.texts, matched.text_ids.tolist(), strict=True))

    def picture_of(text: str) -> tuple[Image.Image, bool | None] | None:
        index = first_image.get(text_id[text])
        return None if index is None else (matched.samples[index].image, None)

    return picture_of


def encode(image: Image.Image) -> Picture:
    """Encode as PNG in a data URI, reduced to at most 128 pixels per side."""
    small = max(image.size) <= 48
    image = image.copy() if image.mode in ("L", "RGB") else image.convert("RGB")
    image.thumbnail((_LARGEST, _LARGEST))
    buffer = io.BytesIO()
    image.save(buffer, format="PNG", optimize=True)
    return Picture("data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode(), small)
