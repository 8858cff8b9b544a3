"""Write the report of an evaluation that has just been made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megabatch.evaluation.report.content import Confusion, Content, TaskContent, relative, save
from megabatch.evaluation.report.examples import PictureOf, galleries
from megabatch.evaluation.report.page import make_page
from megabatch.evaluation.report.similarities import embedding_map, heat_map, histogram
from megabatch.evaluation.run_folder import write_atomically
from megabatch.evaluation.samples import first_of
from megabatch.evaluation.tasks import Matched


@dataclass(frozen=True)
class Shown:
    """The source of the report's part about a task.

    picture_of, pictures_are: as in `Task`. of_classes: whether the texts are names of classes.
    """

    title: str
    matched: Matched
    picture_of: PictureOf | None = None
    pictures_are: str = "one of its evaluated images"
    of_classes: bool = False


def write_report(
    folder: Path,
    run: Path | None,
    shown: Sequence[Shown],
    confusions: dict[str, list[Confusion]],
) -> Path:
    """Write `report.json` and `report.html` next to `folder/evaluation.json`.

    `run`: the run's folder, None for a model without a run. `confusions`: by the title of the task.
    """
    save(folder, Content(relative(run, folder), [_content(s) for s in shown], confusions))
    path = folder / "report.html"
    write_atomically(path, make_page(folder))
    return path


def _content(shown: Shown) -> TaskContent:
    return TaskContent(
        title=shown.title,
        first=first_of(shown.matched.samples),
        pictures_are=shown.pictures_are,
        histogram=histogram(shown.matched),
        heat_map=heat_map(shown.matched),
        map=embedding_map(shown.matched, of_classes=shown.of_classes),
        galleries=galleries(shown.matched, shown.picture_of),
    )
