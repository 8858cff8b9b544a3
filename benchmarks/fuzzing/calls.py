"""The library's calls of a case."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fuzzing.cases import Case, Given
from megabatch import losses, similarity


def clip(case: Case, g: Given, group: Any) -> list[Tensor]:
    o = case["options"]
    settings = {"duplicates": o["duplicates"], "label_smoothing": o["label_smoothing"]}
    loss = losses.ClipLoss(**settings, normalize=case["normalize"], group=group)
    bias = g.bias if o["bias"] else None
    x, y = g.features["x"], g.features["y"]
    return [loss(x, y, g.scale, bias, ids=g.ids.get("x"), weights=g.weights)]


def distill(case: Case, g: Given, group: Any) -> list[Tensor]:
    loss = losses.DistillClipLoss(normalize=case["normalize"], group=group)
    x, y, *teacher = g.features.values()
    return [*loss(x, y, g.scale, *teacher, case["options"]["teacher_scale"])]


def siglip(case: Case, g: Given, group: Any) -> list[Tensor]:
    loss = losses.SigLipLoss(normalize=case["normalize"], group=group)
    bias = g.bias if case["options"]["bias"] else None
    x, y = g.features["x"], g.features["y"]
    return [loss(x, y, g.scale, bias, ids=g.ids.get("x"), weights=g.weights)]


def _with_temperature(make: Callable[[Any], Any], case: Case, g: Given) -> Callable[..., Tensor]:
    """The loss with its temperature, which the constructor gets or each call."""
    if not case["options"]["in_call"]:
        loss: Callable[..., Tensor] = make(g.scale)
        return loss
    return lambda *args, **options: make(1.0)(*args, **options, temperature=g.scale)


def infonce(case: Case, g: Given, group: Any) -> list[Tensor]:
    o, f = case["options"], g.features
    others = ("negatives", "own", "queue", "guide", "in_call", "log_q")
    settings = {k: v for k, v in o.items() if k not in others}
    settings |= {"normalize": case["normalize"], "group": group}
    loss = _with_temperature(lambda t: losses.InfoNCELoss(t, **settings), case, g)
    further = {"queue": f.get("queue"), "ids": g.ids.get("x"), "weights": g.weights}
    names = {"query": "x", "positive": "y", "negatives": "negatives", "queue": "queue"}
    guides = {f"guide_{name}": f.get(f"guide {matrix}") for name, matrix in names.items()}
    columns = {"log_q": "y", "log_q_negatives": "negatives", "log_q_queue": "queue"}
    corrections = {name: g.log_q.get(matrix) for name, matrix in columns.items()}
    return [loss(f["x"], f["y"], f.get("negatives"), **further, **guides, **corrections)]


def views(case: Case, g: Given, group: Any) -> list[Tensor]:
    kind = losses.NTXentLoss if case["call"] == "ntxent" else losses.DCLLoss
    option = "tau_plus" if case["call"] == "ntxent" else "sigma"
    settings = {option: case["options"][option], "normalize": case["normalize"], "group": group}
    return [_with_temperature(lambda t: kind(t, **settings), case, g)(*g.features.values())]


def supcon(case: Case, g: Given, group: Any) -> list[Tensor]:
    settings = {"form": case["options"]["form"], "normalize": case["normalize"], "group": group}
    loss = _with_temperature(lambda t: losses.SupConLoss(t, **settings), case, g)
    return [loss(*(m[n] for n in g.features for m in (g.features, g.ids)))]


def _inner(case: Case, group: Any, normalize: bool = False) -> Any:
    kind = losses.ClipLoss if case["options"]["inner"] == "clip" else losses.SigLipLoss
    return kind(normalize=normalize, group=group)


def matryoshka(case: Case, g: Given, group: Any) -> list[Tensor]:
    o, f = case["options"], g.features
    # Prefixes are normalised by this loss or by the inner one.
    ours = case["normalize"] and case["index"] % 2 == 0
    inner = _inner(case, group, case["normalize"] and not ours)
    loss = losses.MatryoshkaLoss(inner, o["dims"], o["weights"], normalize=ours)
    return [loss(f["x"], f["y"], g.scale, g.bias)]


def multimodal(case: Case, g: Given, group: Any) -> list[Tensor]:
    o = case["options"]
    pairs = [(a, b) for a, b in o["pairs"]]
    loss = losses.MultiModalLoss(
        pairs, weights=o["weights"], loss=_inner(case, group), normalize=case["normalize"]
    )
    features = {n: None if n == o["absent"] else f for n, f in g.features.items()}
    return [loss(features, g.scale, g.bias, present=g.masks)]


def logsumexp(case: Case, g: Given, group: Any) -> list[Tensor]:
    x, y = g.features["x"], g.features["y"]
    found = similarity.logsumexp(x, y, g.scale, sides=case["options"]["sides"], group=group)
    return [side for side in found if side is not None]


def split_logsumexp(case: Case, g: Given, group: Any) -> list[Tensor]:
    o, x, y = case["options"], g.features["x"], g.features.get("y")
    pairs: Any = "paired" if not g.ids else g.ids["x"] if y is None else (g.ids["x"], g.ids["y"])
    positives = "ids" if y is None or not g.ids else o["positives"]
    settings = {"ids": pairs, "positives": positives, "sides": o["sides"], "group": group}
    found = similarity.split_logsumexp(x, y, g.scale, ceiling=ceiling(case, g), **settings)
    return [part for side in found if side is not None for part in side]


def ceiling(case: Case, g: Given) -> Tensor | None:
    margin = case["options"].get("margin")
    scale = g.scale if isinstance(g.scale, float) else g.scale.detach().reshape(()).double()
    if margin is None:
        return None
    x = g.features["x"]
    made = torch.ones((len(x), 2), dtype=torch.float64, device=x.device) * (margin * scale)
    if case["index"] % 3 == 0:
        return made[:1, 0].expand(len(x)) if len(x) else made[:, 0]
    return made[:, 0] if case["index"] % 3 == 1 else made[:, 0].contiguous()


def softplus_sum(case: Case, g: Given, group: Any) -> list[Tensor]:
    pairs: Any = (g.ids["x"], g.ids["y"]) if g.ids else "paired"
    x, y = g.features["x"], g.features["y"]
    settings = {"ids": pairs, "weight": g.weights, "group": group}
    return [similarity.softplus_sum(x, y, g.scale, g.bias, **settings)]


def paired(case: Case, g: Given, group: Any) -> list[Tensor]:
    return [similarity.paired(g.features["x"], g.features["y"], g.scale)]


def ranks(case: Case, g: Given, group: Any) -> list[Tensor]:
    x, y = g.features["x"], g.features["y"]
    pairs = (g.ids["x"], g.ids["y"]) if g.ids else None
    return [*similarity.ranks(x, y, target(case, x), ids=pairs, group=group)]


def target(case: Case, x: Tensor) -> Tensor:
    """Each row's column, the same for rows of the same place on each rank."""
    return (torch.arange(len(x), device=x.device) * 7) % sum(case["columns"])


def topk(case: Case, g: Given, group: Any) -> list[Tensor]:
    pairs = (g.ids["x"], g.ids["y"]) if g.ids else None
    x, y, k = g.features["x"], g.features["y"], case["options"]["k"]
    return [*similarity.topk(x, y, k, ids=pairs, group=group)]


CALLS: dict[str, Callable[[Case, Given, Any], list[Tensor]]] = {
    "clip": clip,
    "distill": distill,
    "siglip": siglip,
    "infonce": infonce,
    "ntxent": views,
    "dcl": views,
    "supcon": supcon,
    "matryoshka": matryoshka,
    "multimodal": multimodal,
    "logsumexp": logsumexp,
    "split_logsumexp": split_logsumexp,
    "softplus_sum": softplus_sum,
    "paired": paired,
    "ranks": ranks,
    "topk": topk,
}
