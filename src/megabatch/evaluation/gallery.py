"""Held-out queries with their top-five answers, as pictures for the report."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable
from dataclasses import dataclass

import torch
from PIL import Image

from megabatch.evaluation.retrieval import best_right_columns
from megabatch.evaluation.tasks import Matched
from megabatch.similarity import ranks, topk

_LARGEST = 128  # pixels a side of an embedded picture
_LOOKED_THROUGH = 500  # queries among which failures are sought


@dataclass(frozen=True)
class Picture:
    """An image as a data URI; `small` ones are shown enlarged, pixel by pixel."""

    uri: str
    small: bool


@dataclass(frozen=True)
class Answer:
    """One answered text; `known`: the training set has it (None where that is not known)."""

    text: str
    picture: Picture | None
    known: bool | None
    right: bool
    cosine: float


@dataclass(frozen=True)
class Query:
    """One image with the texts that score highest for it; `rank` of the right one, 1 is best."""

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
    """Queries drawn at random from all, and more from those whose right answer is not the first.

    `picture_of`: as a `Task` has it.
    """
    order = torch.randperm(len(matched.indices), generator=torch.Generator().manual_seed(seed))
    order = order[: examples + _LOOKED_THROUGH].to(matched.features.device)
    asked, ids = matched.features[order], matched.image_ids[order]
    target, tied = best_right_columns(asked, matched.text_features, ids, matched.text_ids)
    above, equal = ranks(
        asked, matched.text_features, target, ids=(ids, matched.text_ids), group="local"
    )
    expected = 1 + above + (equal / (tied + 1)).ceil().long()
    ranked = list(zip(order.tolist(), target.tolist(), expected.tolist(), strict=True))
    show = _shower(matched, picture_of or _pictures_of(matched))
    missed = [query for query in ranked[examples:] if query[2] > 1][:failures]
    return [show(*query) for query in ranked[:examples]], [show(*query) for query in missed]


def _shower(
    matched: Matched, picture_of: Callable[[str], tuple[Image.Image, bool | None] | None]
) -> Callable[[int, int, int], Query]:
    """Return what turns an image's place, its best right text and that one's rank into a query."""

    def show(place: int, right: int, rank: int) -> Query:
        sample = matched.samples[matched.indices[place]]
        k = min(5, len(matched.texts))
        cosines, found = topk(
            matched.features[place : place + 1], matched.text_features, k, group="local"
        )
        answers = []
        for cosine, at in zip(cosines[0].tolist(), found[0].tolist(), strict=True):
            drawn = picture_of(matched.texts[at])
            answers.append(
                Answer(
                    text=matched.texts[at],
                    picture=encode(drawn[0]) if drawn else None,
                    known=drawn[1] if drawn else None,
                    right=bool(matched.text_ids[at] == matched.image_ids[place]),
                    cosine=cosine,
                )
            )
        return Query(sample.key, matched.texts[right], encode(sample.image), rank, answers)

    return show


def _pictures_of(matched: Matched) -> Callable[[str], tuple[Image.Image, bool | None] | None]:
    """For data that brings no pictures of its own: the first evaluated image of a text."""
    first_image: dict[int, int] = {}
    for index, which in zip(matched.indices, matched.image_ids.tolist(), strict=True):
        first_image.setdefault(which, index)
    which_text = dict(zip(matched.texts, matched.text_ids.tolist(), strict=True))

    def picture_of(text: str) -> tuple[Image.Image, bool | None] | None:
        index = first_image.get(which_text[text])
        return None if index is None else (matched.samples[index].image, None)

    return picture_of


def encode(image: Image.Image) -> Picture:
    """A PNG in a data URI, reduced to 128 pixels a side at most."""
    small = max(image.size) <= 48
    image = image.copy() if image.mode in ("L", "RGB") else image.convert("RGB")
    image.thumbnail((_LARGEST, _LARGEST))
    buffer = io.BytesIO()
    image.save(buffer, format="PNG", optimize=True)
    return Picture("data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode(), small)
