"""The held-out pairs that a model is asked for, from what a user and a run's settings name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megabatch.data import open_pairs
from megabatch.data.mixture import SEPARATOR
from megabatch.data.sources import split_spec
from megabatch.data.svg import SVG_SIZE
from megabatch.errors import UsageError
from megabatch.evaluation.captions import open_captioned
from megabatch.evaluation.samples import CaptionedPairs, Captions, Samples
from megabatch.evaluation.tasks import first_of

_COLUMNS = {
    "image_column": "csv_img_key",
    "query_column": "csv_query_key",
    "caption_column": "csv_caption_key",
}


def reading_of(trained: Mapping[str, Any], val_data: str) -> dict[str, Any]:
    """How a run's training data were read, as far as it holds for other data.

    Args:
        trained: the run's settings; empty where there is no run.
        val_data: the other data.

    Returns:
        image_column, query_column, caption_column, separator and svg_size, as `open_pairs` takes
        them. A column that has a name for each of several sources is kept for as many sources only.
    """
    reading = {option: trained.get(name) for option, name in _COLUMNS.items()}
    if len(_parts(trained.get("train_data") or "")) > 1:
        sources = len(split_spec(val_data))
        for option, names in reading.items():
            if names is not None and len(_parts(names)) not in (1, sources):
                reading[option] = None
    separator, svg_size = trained.get("csv_separator"), trained.get("svg_size", SVG_SIZE)
    return {**reading, "separator": separator, "svg_size": svg_size}


def open_val_data(
    val_data: str,
    model: str,
    first: str,
    reading: Mapping[str, Any],
    *,
    image_folder: Path | None = None,
    split: str | None = None,
) -> Samples[Captions]:
    """Open held-out pairs for a model.

    Args:
        val_data: what `open_captioned` takes or, of texts, `open_pairs`.
        model: its name, for messages. first: what it takes first, "image" or "text".
        reading: as `reading_of` returns it.
        image_folder, split: as for `open_captioned`.

    Raises:
        UsageError: they cannot be opened, or are of another kind than the model takes.
    """
    unused = "query_column" if first == "image" else "image_column"
    options = {option: value for option, value in reading.items() if option != unused}
    samples: Samples[Captions]
    if first == "text":
        samples = CaptionedPairs(open_pairs(val_data, **options))
    else:
        samples = open_captioned(val_data, image_folder=image_folder, split=split, **options)
    if (given := first_of(samples)) != first:
        raise UsageError(f"{model} takes {first}s with texts, but {val_data} has {given}s")
    return samples


def _parts(names: str) -> list[str]:
    return names.split(SEPARATOR)
