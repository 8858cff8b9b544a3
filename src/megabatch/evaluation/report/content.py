"""`report.json`: examples and distributions that an evaluation keeps for its report.

A page can be made from it at any time, without the model or the data. Of each task it has

- `title`, `first` ("image" or "text"), `of_classes` (whether the texts name classes) and
  `pictures_are` (of answers, in words);
- `galleries`: queries of each direction with the answers that score highest;
- `histogram`: cosines of a sample of positives and negatives, in equal bins from low to high;
  `separated` is the probability that a positive scores higher than a negative (the ROC's area);
- `heat_map`: cosines of some images (rows) with their texts (columns), in the order of the texts;
- `map`: places of embeddings in the unit square, `second` for texts that belong to images.
"""

from __future__ import annotations

import base64
import io
import json
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from sklearn.metrics import roc_auc_score
from torch import Tensor

from megabatch.errors import UsageError, one_line
from megabatch.evaluation.retrieval import Right, place
from megabatch.evaluation.run_folder import write_atomically
from megabatch.evaluation.samples import first_of
from megabatch.evaluation.table import WAYS
from megabatch.evaluation.tasks import Matched
from megabatch.similarity import topk

NAME = "report.json"
COLOURS = 10  # of the page, for classes and runs
_EXAMPLES, _FAILURES, _SEARCHED = 8, 4, 500  # queries; those among which failures are sought
_ANSWERS = 5  # shown for each query
_LARGEST, _SMALL = 128, 48  # pixels per side of a picture; of one that is enlarged in blocks
_LONGEST = 400  # characters of a text
_SAMPLED, _BINS = 2000, 60  # images and texts of the histogram
_LARGEST_MATRIX = 40  # rows of a heat map
_MAPPED, _FEWEST = 150, 5  # images in a map, with as many texts
_ALL_CLASSES = 20  # of more classes, the map has those of its images


def save(
    folder: Path,
    run: Path | None,
    shown: Sequence[Matched],
    confusions: dict[str, list[dict[str, Any]]],
) -> None:
    """Write `folder/report.json`, of an evaluation's folder.

    Args:
        folder: the folder.
        run: the run's, None for a model without a run. The file has its relative path, so that both
            can be moved together.
        shown: the tasks.
        confusions: by each method, by the title of the task.
    """
    content = {
        "run": None if run is None else os.path.relpath(run.resolve(), folder.resolve()),
        "tasks": [_of_task(matched) for matched in shown],
        "confusions": confusions,
    }
    text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    write_atomically(folder / NAME, text + "\n")


def read(path: Path, *tables: str) -> dict[str, Any]:
    """Read `report.json` or `evaluation.json`; {} if there is no such file.

    Raises:
        UsageError: it is damaged, or lacks one of these tables.
    """
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if wrong := [name for name in tables if type(content.get(name)) is not dict]:
            raise TypeError(f"{wrong[0]} is not a table")
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise UsageError(
            f"{path} is not as this version of megabatch eval writes it ({one_line(error, 200)}): "
            "evaluate again, or remove it"
        ) from error
    return dict(content)


def _of_task(matched: Matched) -> dict[str, Any]:
    return {
        "title": matched.title,
        "first": first_of(matched.samples),
        "of_classes": matched.of_classes,
        "pictures_are": matched.pictures_are,
        "galleries": galleries(matched),
        "histogram": histogram(matched),
        "heat_map": heat_map(matched),
        "map": embedding_map(matched),
    }


# Examples.


def galleries(matched: Matched) -> list[dict[str, Any]]:
    """Draw queries at random in each direction, and further ones with a wrong first answer."""
    firsts, seconds, (there, back) = matched.features, matched.text_features, matched.answers
    image, text, pictured = (partial(entry, matched) for entry in (_image, _text, _pictured_text))
    return [
        _gallery(WAYS[0], firsts, seconds, there, image, pictured),
        _gallery(WAYS[1], seconds, firsts, back, text, image),
    ]


def _gallery(
    way: str,
    queries: Tensor,
    candidates: Tensor,
    right: Right,
    query_entry: Callable[[int], dict[str, Any]],
    answer_entry: Callable[[int], dict[str, Any]],
) -> dict[str, Any]:
    """One direction's queries; an entry is what the page shows of a position among features."""
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
        answers = [
            {"rank": n, "right": column in rights, "cosine": cosine, **answer_entry(column)}
            for n, (cosine, column) in enumerate(zip(cosines, columns, strict=True), start=1)
        ]
        missed = None
        if not rights & set(columns):
            cosine = float(queries[position] @ candidates[best])
            missed = {"rank": ranks[i], "right": True, "cosine": cosine, **answer_entry(best)}
        entry = query_entry(position)
        shown.append({**entry, "rank": ranks[i], "answers": answers, "missed": missed})
    return {"way": way, "examples": shown[:_EXAMPLES], "failures": shown[_EXAMPLES:]}


def _image(matched: Matched, position: int) -> dict[str, Any]:
    """A first element as an entry: a text, or an image with the first of its right texts."""
    first = matched.samples[matched.indices[position]].image
    if isinstance(first, str):
        return {"text": cut(first), "picture": None}
    text = matched.texts[int(matched.answers.there.of_row(position)[0])]
    return {"text": cut(text), "picture": encode(first)}


def _text(matched: Matched, position: int) -> dict[str, Any]:
    return {"text": cut(matched.texts[position]), "picture": None}


def _pictured_text(matched: Matched, position: int) -> dict[str, Any]:
    """A text with the task's picture of it, else with the first evaluated image of it."""
    images = matched.answers.back.of_row(position)
    if matched.picture_of is not None:
        image = matched.picture_of(matched.texts[position])
        picture = None if image is None else encode(image)
    else:
        picture = _image(matched, int(images[0]))["picture"] if len(images) else None
    return {"text": cut(matched.texts[position]), "picture": picture}


def cut(text: str) -> str:
    """The text, cut off if it is very long."""
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"


def encode(image: Image.Image) -> dict[str, Any]:
    """Reduce an image to at most 128 pixels per side: PNG, or JPEG if that is smaller."""
    small = max(image.size) <= _SMALL
    image = image.copy() if image.mode in ("L", "RGB") else image.convert("RGB")
    image.thumbnail((_LARGEST, _LARGEST))
    files = {"png": _file(image, "PNG")}
    if not small:
        files["jpeg"] = _file(image, "JPEG", quality=80)
    kind = min(files, key=lambda kind: len(files[kind]))
    return {"kind": kind, "data": base64.b64encode(files[kind]).decode(), "small": small}


def _file(image: Image.Image, form: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format=form, optimize=True, **options)
    return buffer.getvalue()


# Similarities.


def histogram(matched: Matched) -> dict[str, Any]:
    """Cosines of sampled images with a right text each (positives) and with others (negatives)."""
    images, rights = _sample(matched, _SAMPLED)
    texts = _drawn(len(matched.texts), _SAMPLED, 1).to(images.device)
    there, features = matched.answers.there, matched.features[images]
    wrong = torch.stack([~torch.isin(texts, there.of_row(i)) for i in images.tolist()])
    positives = (features * matched.text_features[rights]).sum(1).cpu()
    negatives = (features @ matched.text_features[texts].T)[wrong].cpu()
    both = torch.cat([positives, negatives])
    low, high = float(both.min()), float(both.max())
    if high - low < 1e-3:  # a collapsed model
        low, high = low - 0.01, high + 0.01
    counts = [
        torch.histc(c.float(), _BINS, low, high).long().tolist() for c in (positives, negatives)
    ]
    is_positive = np.arange(len(both)) < len(positives)
    separated = float(roc_auc_score(is_positive, both)) if len(negatives) else 1.0
    return {
        "low": low,
        "high": high,
        "positives": counts[0],
        "negatives": counts[1],
        "mean_positive": float(positives.double().mean()),
        "mean_negative": float(negatives.double().mean()) if len(negatives) else 0.0,
        "separated": separated,
    }


def heat_map(matched: Matched) -> dict[str, Any]:
    """Cosines of up to 40 images with texts of theirs, no text twice, in alphabetical order."""
    images, rights = (part.tolist() for part in _sample(matched, 4 * _LARGEST_MATRIX))
    image_of = dict(zip(reversed(rights), reversed(images), strict=True))
    chosen = list(dict.fromkeys(rights))[:_LARGEST_MATRIX]
    columns = sorted(chosen, key=lambda column: matched.texts[column])
    rows = [image_of[column] for column in columns]
    cosines = matched.features[rows] @ matched.text_features[columns].T
    return {
        "texts": [cut(matched.texts[column]) for column in columns],
        "cosines": [[round(value, 3) for value in row] for row in cosines.tolist()],
    }


def embedding_map(matched: Matched) -> list[dict[str, Any]]:
    """A t-SNE map of up to 150 images and their texts; of classes all, if they are few.

    Images and texts are centred on the mean of their kind: without that, the distance between the
    two means separates them in most models. Empty if there are too few images, or if the features
    hardly differ.
    """
    images, rights = _sample(matched, _MAPPED)
    if len(images) < _FEWEST:
        return []
    texts = rights.unique()
    if matched.of_classes and len(matched.texts) <= _ALL_CLASSES:
        texts = torch.arange(len(matched.texts), device=texts.device)
    parts = [matched.features[images], matched.text_features[texts]]
    centred = torch.cat([part - part.mean(0) for part in parts]).float().cpu()
    if float(centred.std()) < 1e-4:
        return []
    groups = [*rights.tolist(), *texts.tolist()]
    second = [False] * len(images) + [True] * len(texts)
    by_class = matched.of_classes and max(groups) < COLOURS
    names = [_image(matched, i)["text"] for i in images.tolist()]
    names += [cut(matched.texts[i]) for i in texts.tolist()]
    return [
        {
            "x": x,
            "y": y,
            "text": name,
            "second": is_second,
            "colour": group if by_class else int(is_second),
        }
        for (x, y), name, is_second, group in zip(
            _tsne(centred), names, second, groups, strict=True
        )
    ]


def _tsne(features: Tensor) -> list[list[float]]:
    """Places (n, 2) in the unit square."""
    from sklearn.manifold import TSNE

    perplexity = min(30.0, (len(features) - 1) / 3)
    fitted = TSNE(init="pca", perplexity=perplexity, random_state=0).fit_transform(features.numpy())
    low, high = fitted.min(0), fitted.max(0)
    places = (fitted.astype(float) - low) / (high - low).clip(min=1e-12)
    return places.round(3).tolist()


def _sample(matched: Matched, n: int) -> tuple[Tensor, Tensor]:
    """Up to n random images, and for each a random one of its right texts."""
    images = _drawn(len(matched.indices), n, 0).to(matched.features.device)
    right = matched.answers.there.of(images)
    chance = torch.rand(len(images), generator=torch.Generator().manual_seed(2))
    within = (chance.to(right.counts.device) * right.counts).long().clamp(max=right.counts - 1)
    return images, right.columns[right.start + within]


def _drawn(among: int, n: int, seed: int) -> Tensor:
    return torch.randperm(among, generator=torch.Generator().manual_seed(seed))[:n]
