"""Held-out queries with their top-five answers, as pictures for the report."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable
from dataclasses import dataclass

import torch
from PIL import Image

from megabatch.evaluation.tasks import Scored
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
    scored: Scored, *, examples: int, failures: int, seed: int = 0
) -> tuple[list[Query], list[Query]]:
    """Queries drawn at random from all, and more from those whose right answer is not the first."""
    order = torch.randperm(len(scored.text_ids), generator=torch.Generator().manual_seed(seed))
    order = order[: examples + _LOOKED_THROUGH]
    text_range = torch.arange(len(scored.texts))
    right = scored.text_ids[order]
    above, equal = ranks(
        scored.images.features[order], scored.text_features, right, ids=(right, text_range)
    )
    ranked = list(zip(order.tolist(), (1 + above + (equal + 1) // 2).tolist(), strict=True))
    show = _shower(scored)
    missed = [pair for pair in ranked[examples:] if pair[1] > 1][:failures]
    return [show(*pair) for pair in ranked[:examples]], [show(*pair) for pair in missed]


def _shower(scored: Scored) -> Callable[[int, int], Query]:
    """Return what turns the place of an embedded image, and its rank, into a query."""
    images, pairs = scored.images, scored.task.pairs
    picture_of = scored.task.picture_of or _pictures_of_pairs(scored)

    def show(place: int, rank: int) -> Query:
        pair = pairs[images.indices[place]]
        k = min(5, len(scored.texts))
        cosines, found = topk(images.features[place : place + 1], scored.text_features, k)
        answers = []
        for cosine, at in zip(cosines[0].tolist(), found[0].tolist(), strict=True):
            drawn = picture_of(scored.texts[at])
            answers.append(
                Answer(
                    text=scored.texts[at],
                    picture=encode(drawn[0]) if drawn else None,
                    known=drawn[1] if drawn else None,
                    right=at == int(scored.text_ids[place]),
                    cosine=cosine,
                )
            )
        return Query(pair.key, pair.caption, encode(pair.image), rank, answers)

    return show


def _pictures_of_pairs(scored: Scored) -> Callable[[str], tuple[Image.Image, bool | None] | None]:
    """For data that brings no pictures of its own: the first evaluated image of a text."""
    first: dict[str, int] = {}
    for caption, index in zip(scored.images.captions, scored.images.indices, strict=True):
        first.setdefault(caption, index)

    def picture_of(text: str) -> tuple[Image.Image, bool | None] | None:
        return (scored.task.pairs[first[text]].image, None) if text in first else None

    return picture_of


def encode(image: Image.Image) -> Picture:
    """A PNG in a data URI, reduced to 128 pixels a side at most."""
    small = max(image.size) <= 48
    image = image.copy() if image.mode in ("L", "RGB") else image.convert("RGB")
    image.thumbnail((_LARGEST, _LARGEST))
    buffer = io.BytesIO()
    image.save(buffer, format="PNG", optimize=True)
    return Picture("data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode(), small)
