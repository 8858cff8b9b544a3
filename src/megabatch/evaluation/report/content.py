"""`report.json`: examples and distributions that an evaluation keeps for its report.

A page can be made from it at any time, without the model or the data. Of each task it has

- `title`, and `first`, "image" or "text";
- `galleries`: queries of each direction with the answers that score highest;
- `histogram`: cosines of a sample of positives and negatives, in equal bins from low to high.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from megabatch.evaluation.retrieval import Right, place
from megabatch.evaluation.run_folder import write_atomically
from megabatch.evaluation.samples import first_of
from megabatch.evaluation.table import WAYS
from megabatch.evaluation.tasks import Matched
from megabatch.similarity import topk

NAME = "report.json"
_EXAMPLES, _FAILURES, _SEARCHED = 8, 4, 500  # queries; those among which failures are sought
_ANSWERS = 5  # shown for each query
_LARGEST, _SMALL = 128, 48  # pixels per side of a picture; of one that is enlarged in blocks
_LONGEST = 400  # characters of a text
_SAMPLED, _BINS = 2000, 60  # images and texts of the histogram


def save(folder: Path, shown: Sequence[Matched]) -> None:
    """Write `report.json`, of these tasks, into an evaluation's folder."""
    tasks = [
        {
            "title": matched.title,
            "first": first_of(matched.samples),
            "galleries": galleries(matched),
            "histogram": histogram(matched),
        }
        for matched in shown
    ]
    text = json.dumps({"tasks": tasks}, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    write_atomically(folder / NAME, text + "\n")


def galleries(matched: Matched) -> list[dict[str, Any]]:
    """Draw queries at random in each direction, and further ones with a wrong first answer."""
    firsts, seconds, (there, back) = matched.features, matched.text_features, matched.answers
    return [
        _gallery(matched, WAYS[0], firsts, seconds, there, _image, _text),
        _gallery(matched, WAYS[1], seconds, firsts, back, _text, _image),
    ]


def _gallery(
    matched: Matched,
    way: str,
    queries: Tensor,
    candidates: Tensor,
    right: Right,
    query_entry: Callable[[Matched, int], dict[str, Any]],
    answer_entry: Callable[[Matched, int], dict[str, Any]],
) -> dict[str, Any]:
    """One direction's queries; an entry is what the page shows of a position among features.

    The answers are the best ones, and the best right one if it is not among them.
    """
    answerable = right.counts.nonzero().squeeze(1)
    drawn = answerable[_drawn(len(answerable), _EXAMPLES + _SEARCHED, 0).to(answerable.device)]
    placed = place(queries[drawn], candidates, right.of(drawn))
    ranks = (1 + placed.above + (placed.equal / (placed.tied + 1)).ceil().long()).tolist()
    failures = [i for i in range(_EXAMPLES, len(drawn)) if ranks[i] > 1][:_FAILURES]
    chosen = [*range(min(_EXAMPLES, len(drawn))), *failures]
    k = min(_ANSWERS, len(candidates))
    top = topk(queries[drawn[chosen]], candidates, k, group="local")
    shown = []
    for i, cosines, columns in zip(chosen, *(t.tolist() for t in top), strict=True):
        position, best = int(drawn[i]), int(placed.best[i])
        rights = set(right.of_row(position).tolist())
        found = [*zip(range(1, k + 1), columns, cosines, strict=True)]
        if not rights & set(columns):
            found.append((ranks[i], best, float(queries[position] @ candidates[best])))
        answers = [
            {"rank": rank, "right": column in rights, "cosine": cosine}
            | answer_entry(matched, column)
            for rank, column, cosine in found
        ]
        shown.append({**query_entry(matched, position), "rank": ranks[i], "answers": answers})
    return {"way": way, "examples": shown[:_EXAMPLES], "failures": shown[_EXAMPLES:]}


def _image(matched: Matched, position: int) -> dict[str, Any]:
    """A first element as an entry: a text, or an image with the first of its right texts."""
    first = matched.samples[matched.indices[position]].image
    if isinstance(first, str):
        return {"text": cut(first), "picture": None}
    text = matched.texts[int(matched.answers.there.of_row(position)[0])]
    return {"text": cut(text), "picture": encode(first)}


def _text(matched: Matched, position: int) -> dict[str, Any]:
    """A text as an entry, with the first of its evaluated images."""
    images = matched.answers.back.of_row(position)
    picture = _image(matched, int(images[0]))["picture"] if len(images) else None
    return {"text": cut(matched.texts[position]), "picture": picture}


def cut(text: str) -> str:
    """The text, cut off if it is very long."""
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"


def encode(image: Image.Image) -> dict[str, Any]:
    """Reduce an image to at most 128 pixels per side, as JPEG; a small one is kept as PNG."""
    small = max(image.size) <= _SMALL
    image = image.copy() if image.mode in ("L", "RGB") else image.convert("RGB")
    image.thumbnail((_LARGEST, _LARGEST))
    kind, buffer = "png" if small else "jpeg", io.BytesIO()
    image.save(buffer, format=kind, optimize=True, quality=80)
    data = base64.b64encode(buffer.getvalue()).decode()
    return {"kind": kind, "data": data, "small": small}


def histogram(matched: Matched) -> dict[str, Any]:
    """Cosines of sampled images with their first right text (positives), and with wrong ones."""
    there = matched.answers.there
    images, texts = (
        _drawn(n, _SAMPLED, seed).to(matched.features.device)
        for seed, n in enumerate((len(matched.indices), len(matched.texts)))
    )
    rights = there.columns[there.start[images]]
    features = matched.features[images]
    wrong = torch.stack([~torch.isin(texts, there.of_row(i)) for i in images.tolist()])
    positives = (features * matched.text_features[rights]).sum(1).float().cpu()
    negatives = (features @ matched.text_features[texts].T)[wrong].float().cpu()
    both = torch.cat([positives, negatives])
    low, high = float(both.min()), float(both.max())
    if high - low < 1e-3:  # a collapsed model
        low, high = low - 0.01, high + 0.01
    return {
        "low": low,
        "high": high,
        "positives": torch.histc(positives, _BINS, low, high).long().tolist(),
        "negatives": torch.histc(negatives, _BINS, low, high).long().tolist(),
        "mean_positive": float(positives.double().mean()),
        "mean_negative": float(negatives.double().mean()) if len(negatives) else 0.0,
    }


def _drawn(among: int, n: int, seed: int) -> Tensor:
    return torch.randperm(among, generator=torch.Generator().manual_seed(seed))[:n]
