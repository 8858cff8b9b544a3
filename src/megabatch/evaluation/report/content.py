"""`report.json`: examples that an evaluation keeps for its report.

A page can be made from it at any time, without the model or the data. Of each task it has `title`,
`first` ("image" or "text"), and `galleries`: in each direction queries drawn at random, with the
answers that score highest.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
from PIL import Image
from torch import Tensor

from megabatch.data.images import decoded
from megabatch.data.pairs import BadSample
from megabatch.evaluation.run_folder import write_atomically
from megabatch.evaluation.table import WAYS
from megabatch.evaluation.tasks import Matched
from megabatch.evaluation.tokens import scores
from megabatch.similarity.matrix import strips

NAME = "report.json"
_QUERIES, _ANSWERS = 12, 5  # shown in each direction; for each query
_LARGEST, _SMALL = 128, 48  # pixels per side of a picture; of one that is enlarged in blocks
_LONGEST = 400  # characters of a text
_AT_ONCE = 1024  # candidates that are scored

#: What the page shows of a position among a task's features.
Entry: TypeAlias = Callable[[Matched, int], dict[str, Any]]


def save(folder: Path, shown: Sequence[Matched]) -> None:
    """Write `report.json`, of these tasks, into an evaluation's folder."""
    tasks = [
        {"title": task.title, "first": task.samples.first, "galleries": galleries(task)}
        for task in shown
    ]
    text = json.dumps({"tasks": tasks}, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    write_atomically(folder / NAME, text + "\n")


def galleries(task: Matched) -> list[dict[str, Any]]:
    """Queries of each direction with their answers."""
    return [
        {"way": WAYS[0], "examples": _examples(task, 0, _image, _text)},
        {"way": WAYS[1], "examples": _examples(task, 1, _text, _image)},
    ]


def _scores(task: Matched, drawn: Tensor, side: int) -> Tensor:
    """Scores of some images (`side` 0) against all texts, or of some texts (1) against images."""
    x, y = task.features, task.text_features
    if side == 0:
        return torch.cat([scores(x, y, drawn, j) for j in strips(len(y), _AT_ONCE)], 1)
    return torch.cat([scores(x, y, i, drawn) for i in strips(len(x), _AT_ONCE)]).T


def _examples(task: Matched, side: int, query: Entry, answer: Entry) -> list[dict[str, Any]]:
    """Queries with their best answers, and the best right one if it is not among them."""
    right = task.answers[side]
    answerable = right.counts.nonzero().squeeze(1)
    order = torch.randperm(len(answerable), generator=torch.Generator().manual_seed(0))
    drawn = answerable[order[:_QUERIES].to(answerable.device)]
    examples = []
    for position, found in zip(drawn.tolist(), _scores(task, drawn, side), strict=True):
        ranked = found.argsort(descending=True, stable=True)
        is_right = torch.isin(ranked, right.of_row(position))
        best = int(is_right.nonzero()[0])
        shown = [*range(min(_ANSWERS, len(ranked))), *([best] if best >= _ANSWERS else [])]
        answers = [
            {
                "rank": place + 1,
                "right": bool(is_right[place]),
                "score": float(found[ranked[place]]),
                **answer(task, int(ranked[place])),
            }
            for place in shown
        ]
        examples.append({**query(task, position), "rank": best + 1, "answers": answers})
    return examples


def _image(task: Matched, position: int) -> dict[str, Any]:
    """A first element as an entry: a text, or an image (or sound) with the first of its texts."""
    first = task.samples[task.indices[position]].image
    if isinstance(first, str):
        return {"text": first[:_LONGEST], "picture": None}
    text = task.texts[int(task.answers.there.of_row(position)[0])]
    picture = None
    with contextlib.suppress(BadSample):  # not of a sound
        picture = encode(decoded(first))
    return {"text": text[:_LONGEST], "picture": picture}


def _text(task: Matched, position: int) -> dict[str, Any]:
    """A text as an entry, with the first of its evaluated images."""
    images = task.answers.back.of_row(position)
    picture = _image(task, int(images[0]))["picture"] if len(images) else None
    return {"text": task.texts[position][:_LONGEST], "picture": picture}


def encode(image: Image.Image) -> dict[str, str]:
    """Reduce an image to at most 128 pixels per side, as JPEG; a small one is kept as PNG."""
    kind, buffer = "png" if max(image.size) <= _SMALL else "jpeg", io.BytesIO()
    image = image.copy() if image.mode in ("L", "RGB") else image.convert("RGB")
    image.thumbnail((_LARGEST, _LARGEST))
    image.save(buffer, format=kind, optimize=True, quality=80)
    data = base64.b64encode(buffer.getvalue()).decode()
    return {"kind": kind, "data": data}
