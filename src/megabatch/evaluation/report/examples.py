"""Example queries with the answers that score highest, in both directions."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from PIL import Image
from torch import Tensor

from megabatch.evaluation.answers import Right, place
from megabatch.evaluation.report.content import Answer, Gallery, Picture, Query
from megabatch.evaluation.samples import first_of
from megabatch.evaluation.table import WAYS
from megabatch.evaluation.tasks import Matched
from megabatch.similarity import topk

_SHOWN = 5  # answers for each query
_SEARCHED = 500  # queries among which failures are sought
_LARGEST = 128  # pixels per side of an embedded picture
_LONGEST = 400  # characters of an embedded text

PictureOf = Callable[[str], tuple[Image.Image, bool] | None]


@dataclass(frozen=True)
class _Entry:
    """An image or a text as the page shows it."""

    text: str
    picture: Picture | None = None
    known: bool | None = None


@dataclass(frozen=True)
class _Side:
    """Features (n, d), and a function from a position to its entry."""

    features: Tensor
    entry: Callable[[int], _Entry]


def galleries(
    matched: Matched, picture_of: PictureOf | None = None, *, examples: int = 8, failures: int = 4
) -> list[Gallery]:
    """Galleries of both directions; `picture_of` as in `Task`.

    Queries are drawn at random, and as failures further ones whose first answer is wrong.
    """
    firsts = _Side(matched.features, _first_entry(matched))
    seconds = _Side(matched.text_features, _second_entry(matched, picture_of))
    texts = _Side(matched.text_features, lambda i: _Entry(cut(matched.texts[i])))
    there, back = matched.answers.there, matched.answers.back
    return [
        _gallery(WAYS[0], firsts, seconds, there, examples, failures),
        _gallery(WAYS[1], texts, firsts, back, examples, failures),
    ]


def cut(text: str) -> str:
    """The text, cut off if it is very long."""
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"


def first_text(matched: Matched, position: int) -> str:
    """The text that names a first element: itself, or the first right text of an image."""
    if first_of(matched.samples) == "text":
        return cut(matched.samples[matched.indices[position]].image)
    return cut(matched.texts[int(matched.answers.there.of_row(position)[0])])


def _first_entry(matched: Matched) -> Callable[[int], _Entry]:
    of_texts = first_of(matched.samples) == "text"

    def entry(position: int) -> _Entry:
        text = first_text(matched, position)
        if of_texts:
            return _Entry(text)
        return _Entry(text, encode(matched.samples[matched.indices[position]].image))

    return entry


def _second_entry(matched: Matched, picture_of: PictureOf | None) -> Callable[[int], _Entry]:
    """A text with a picture of it: its own, else its first evaluated image."""
    of_texts = first_of(matched.samples) == "text"

    def entry(position: int) -> _Entry:
        text = matched.texts[position]
        if of_texts:
            return _Entry(cut(text))
        if picture_of is not None:
            drawn = picture_of(text)
            return _Entry(cut(text), encode(drawn[0]), drawn[1]) if drawn else _Entry(cut(text))
        images = matched.answers.back.of_row(position)
        if not len(images):
            return _Entry(cut(text))
        return _Entry(cut(text), encode(matched.samples[matched.indices[int(images[0])]].image))

    return entry


def _gallery(
    way: str, queries: _Side, answers: _Side, right: Right, examples: int, failures: int
) -> Gallery:
    ranked = list(_draw(queries, answers, right, examples + _SEARCHED))
    missed = [query for query in ranked[examples:] if query[2] > 1][:failures]
    return Gallery(
        way,
        [_show(queries, answers, right, *query) for query in ranked[:examples]],
        [_show(queries, answers, right, *query) for query in missed],
    )


def _draw(queries: _Side, answers: _Side, right: Right, n: int) -> Iterator[tuple[int, int, int]]:
    """Random queries that have a right answer: position, best right answer, its expected rank."""
    answerable = right.counts.nonzero().squeeze(1)
    order = torch.randperm(len(answerable), generator=torch.Generator().manual_seed(0))[:n]
    drawn = answerable[order.to(answerable.device)]
    found = place(queries.features[drawn], answers.features, right.of(drawn))
    expected = 1 + found.above + (found.equal / (found.tied + 1)).ceil().long()
    return zip(drawn.tolist(), found.best.tolist(), expected.tolist(), strict=True)


def _show(
    queries: _Side, answers: _Side, right: Right, position: int, best: int, rank: int
) -> Query:
    feature, wanted = queries.features[position : position + 1], right.of_row(position)
    k = min(_SHOWN, len(answers.features))
    cosines, found = topk(feature, answers.features, k, group="local")

    def answer(at: int, place: int, cosine: float) -> Answer:
        entry = answers.entry(at)
        is_right = bool((wanted == at).any())
        return Answer(entry.text, entry.picture, place, is_right, round(cosine, 4), entry.known)

    shown = [
        answer(at, place, cosine)
        for place, (cosine, at) in enumerate(
            zip(cosines[0].tolist(), found[0].tolist(), strict=True), start=1
        )
    ]
    missed = None
    if not any(one.right for one in shown):
        missed = answer(best, rank, float(feature[0] @ answers.features[best]))
    asked = queries.entry(position)
    return Query(asked.text, asked.picture, rank, shown, missed)


def encode(image: Image.Image) -> Picture:
    """Reduce an image to at most 128 pixels per side: PNG, or JPEG if that is smaller."""
    small = max(image.size) <= 48
    image = image.copy() if image.mode in ("L", "RGB") else image.convert("RGB")
    image.thumbnail((_LARGEST, _LARGEST))
    kind, data = "png", _encoded(image, "PNG", optimize=True)
    if not small and len(jpeg := _encoded(image, "JPEG", quality=80, optimize=True)) < len(data):
        kind, data = "jpeg", jpeg
    return Picture(kind, base64.b64encode(data).decode(), small)


def _encoded(image: Image.Image, form: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format=form, **options)
    return buffer.getvalue()
