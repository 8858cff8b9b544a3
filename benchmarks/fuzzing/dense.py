"""The calls of cases.py as dense expressions, from the papers' formulas in plain torch.

Nothing here comes from the library. The whole matrix of logits is formed, of all ranks' rows; with
`product` rounded as a GPU's, the same expressions say how exact a low precision can be.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fuzzing.calls import ceiling, target
from fuzzing.cases import Case, Given

#: (m, d), (n, d) -> (m, n) products
Product = Callable[[Tensor, Tensor], Tensor]


def plain(x: Tensor, y: Tensor) -> Tensor:
    return x @ y.T


def narrow(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Float32 numbers that are those of x as a GPU's products of `dtype` take them.

    Of float32 those are TF32's, cut to ten bits of mantissa. torch's own products are no measure
    of them: cuBLAS multiplies small or unaligned matrices in full precision.
    """
    if dtype != torch.float32:
        return x.to(dtype).float()
    return (x.contiguous().view(torch.int32) & -(1 << 13)).view(torch.float32)


class Rounded(torch.autograd.Function):
    """Products in float32 of narrow features, whose gradient is narrowed like them once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x, y)
        return narrow(x, x.dtype) @ narrow(y, x.dtype).T

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, y = ctx.saved_tensors
        # float16 has no range for gradients of a mean: as in training, they are scaled first.
        size = gradient.abs().max().clamp(min=1e-30) if gradient.numel() else gradient.new_ones(())
        ds = narrow(gradient / size, x.dtype) * size
        dx, dy = ds @ narrow(y, x.dtype), ds.T @ narrow(x, x.dtype)
        return dx.to(x.dtype), dy.to(x.dtype)


def rounded(x: Tensor, y: Tensor) -> Tensor:
    made: Tensor = Rounded.apply(x, y)
    return made


def normalized(x: Tensor, wanted: bool) -> Tensor:
    if not wanted:
        return x
    wide = x if x.dtype == torch.float64 else x.float()
    return (wide / wide.pow(2).sum(-1, keepdim=True).sqrt()).to(x.dtype)


def same(ids: Tensor | None, rows: int, device: torch.device) -> Tensor:
    """(rows, rows): a pair with itself, or two that share an id."""
    eye = torch.eye(rows, dtype=torch.bool, device=device)
    return eye if ids is None else eye | equal(ids, ids)


def equal(a: Tensor, b: Tensor) -> Tensor:
    return (a[:, None] == b[None, :]) & (a >= 0)[:, None]


def lse(s: Tensor, counted: Tensor) -> Tensor:
    """Log-sum-exp of each row's counted entries; -inf, with a gradient of 0, without any."""
    if s.shape[1] == 0:
        return s.sum(1) - torch.inf
    some = counted.any(1)
    values = s.masked_fill(~counted, -torch.inf).masked_fill(~some[:, None], 0.0).logsumexp(1)
    return values.masked_fill(~some, -torch.inf)


def weighted_mean(values: Tensor, weights: Tensor | None) -> Tensor:
    if weights is None:
        return values.mean()
    total = weights.sum()
    return (weights * values).sum() / (total if total > 0 else 1.0)


def clip_of(
    s: Tensor,
    ids: Tensor | None = None,
    weights: Tensor | None = None,
    duplicates: str = "positive",
    smoothing: float = 0.0,
) -> Tensor:
    b = len(s)
    eye = torch.eye(b, dtype=torch.bool, device=s.device)
    alike = same(ids, b, s.device)
    dropped = alike & ~eye if duplicates == "ignored" else torch.zeros_like(eye)
    positive = (eye if duplicates == "ignored" else alike).to(s.dtype)
    target = (1 - smoothing) * positive / positive.sum(1, keepdim=True) + smoothing / b
    losses = torch.zeros_like(s[:, 0])
    for direction in (s, s.T):
        logp = direction.masked_fill(dropped, -torch.inf).log_softmax(1)
        losses = losses - (target * logp.masked_fill(dropped, 0.0)).sum(1) / 2
    return weighted_mean(losses, weights)


def siglip_of(s: Tensor, ids: Tensor | None = None, weights: Tensor | None = None) -> Tensor:
    signs = torch.where(same(ids, len(s), s.device), 1.0, -1.0).to(s.dtype)
    return weighted_mean(-F.logsigmoid(signs * s).sum(1), weights)


def _pair(case: Case, g: Given, product: Product) -> Tensor:
    x, y = (normalized(g.features[name], case["normalize"]) for name in ("x", "y"))
    return g.scale * product(x, y)


def clip(case: Case, g: Given, product: Product) -> list[Tensor]:
    o, s = case["options"], _pair(case, g, product)
    return [clip_of(s, g.ids.get("x"), g.weights, o["duplicates"], o["label_smoothing"])]


def distill(case: Case, g: Given, product: Product) -> list[Tensor]:
    s = _pair(case, g, product)
    u, v = (normalized(g.features[f"teacher {n}"], case["normalize"]).detach() for n in "xy")
    t = case["options"]["teacher_scale"] * product(u, v)
    towards = [(t.softmax(1) * s.log_softmax(1)).sum(), (t.softmax(0) * s.log_softmax(0)).sum()]
    return [clip_of(s), -(towards[0] + towards[1]) / (2 * len(s))]


def siglip(case: Case, g: Given, product: Product) -> list[Tensor]:
    bias = g.bias if case["options"]["bias"] else 0.0
    return [siglip_of(_pair(case, g, product) + bias, g.ids.get("x"), g.weights)]


class Negatives(NamedTuple):
    """One kind of candidates of all queries; `compared`: the similarities for a margin."""

    products: Tensor
    compared: Tensor
    negative: Tensor | None  #: which of them are negatives; None: all
    mode: str = ""  #: the hardness mode that names their kind
    log_q: Tensor | float = 0.0  #: subtracted from their logits


def infonce(case: Case, g: Given, product: Product) -> list[Tensor]:
    o = case["options"]
    f = {name: normalized(value, case["normalize"]) for name, value in g.features.items()}
    b, device = len(f["x"]), f["x"].device
    others = ~same(g.ids.get("x"), b, device)

    def against(row: str, col: str, negative: Tensor | None, mode: str = "") -> Negatives:
        made = product(f[row], f[col].flatten(0, -2))
        guided = o["guide"] and product(f[f"guide {row}"], f[f"guide {col}"].flatten(0, -2))
        log_q = g.log_q[col].flatten() if col in g.log_q else 0.0
        return Negatives(made, guided if o["guide"] else made, negative, mode, log_q)

    pairs = against("x", "y", others, "in_batch_negatives")
    towers = {"query": "x", "positive": "y"}
    parts = [pairs, *(against(towers[name], towers[name], others) for name in o["same_tower"])]
    if o["negatives"] == "shared":
        parts.append(against("x", "negatives", None, "in_batch_negatives"))
    if o["negatives"] == "own":
        made = _products_of_rows(f["x"], f["negatives"])
        guided = o["guide"] and _products_of_rows(f["guide x"], f["guide negatives"])
        compared, log_q = guided if o["guide"] else made, g.log_q.get("negatives", 0.0)
        parts.append(Negatives(made, compared, None, "hard_negatives", log_q))
    if o["negatives"] == "own" and o["share_negatives"]:
        foreign = ~same(None, b, device).repeat_interleave(f["negatives"].shape[1], 1)
        parts.append(against("x", "negatives", foreign, "in_batch_negatives"))
        if "positive" in o["same_tower"]:
            parts.append(against("y", "negatives", foreign))
    if o["queue"] is not None:
        f["queue"] = f["queue"].detach()
        parts.append(against("x", "queue", None, "in_batch_negatives"))
    reverse = Negatives(pairs.products.T, pairs.compared.T, others)
    parts += [reverse] * (o["reverse"] == "joint")
    positive = g.scale * pairs.products.diagonal() - pairs.log_q
    compared = pairs.compared.diagonal()
    losses = _against(case, g, positive, *_negatives(case, g, compared, parts))
    if o["reverse"] == "separate":
        plain_case = {"options": o | {"hardness_mode": None}}
        back = _negatives(plain_case, g, compared, [reverse])
        losses = (losses + _against(case, g, positive, *back)) / 2
    return [weighted_mean(losses, g.weights)]


def _products_of_rows(x: Tensor, own: Tensor) -> Tensor:
    """(b, d) and (b, k, d) -> (b, k): each row with its own others."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    return (x.to(wide)[:, None] * own.to(wide)).sum(-1)


def _negatives(
    case: Case, g: Given, compared: Tensor, parts: list[Negatives]
) -> tuple[Tensor, Tensor]:
    """Logits of all negatives, (b, n), and which of them count; `compared`: of the positives."""
    o = case["options"]
    logits, masks = [], []
    for part in parts:
        weighted = part.mode and o["hardness_mode"] in (part.mode, "all_negatives")
        strength = o["hardness_strength"] if weighted else 0.0
        products = part.products
        logits.append(g.scale * products + strength * products.detach() - part.log_q)
        counted = part.negative
        if counted is None:
            counted = torch.ones_like(part.products, dtype=torch.bool)
        if o["margin"] is not None:
            share = compared.abs() if o["margin_strategy"] == "relative" else 1
            limit = (compared + o["margin"] * share).detach()[:, None]
            note_gaps(g, part.compared.detach() - limit, counted)
            counted = counted & ~(part.compared.detach() > limit)
        masks.append(counted)
    return torch.cat(logits, 1), torch.cat(masks, 1)


def _against(case: Case, g: Given, positive: Tensor, logits: Tensor, counted: Tensor) -> Tensor:
    """Losses of positive logits against a softmax with negative ones."""
    o = case["options"]
    negative = lse(logits, counted)
    if o["tau_plus"]:
        negative = debiased(g, positive, negative, counted.sum(1), o["tau_plus"])
    number = 2 if o["reverse"] == "joint" else 1
    losses = torch.logaddexp(negative, positive + math.log(number)) - positive
    mean = (positive + logits.masked_fill(~counted, 0.0).sum(1)) / (1 + counted.sum(1))
    return losses + o["label_smoothing"] * (positive - mean)


def debiased(g: Given, positive: Tensor, negative: Tensor, count: Tensor, tau: float) -> Tensor:
    """log of N g in "Debiased Contrastive Learning", of logits and log-sum-exps."""
    if not count.any():
        return negative
    count, top = count.to(positive.dtype), torch.maximum(positive, negative).detach()
    left = ((negative - top).exp() - count * tau * (positive - top).exp()) / (1 - tau)
    floor = count * (-g.scale - top).exp()
    g.gaps.append(((left - floor).abs() / (left.abs() + floor)).min().item())
    return torch.maximum(left, floor).log() + top


def note_gaps(g: Given, difference: Tensor, counted: Tensor) -> None:
    if counted.any():
        g.gaps.append(difference[counted].abs().min().item())


def views(case: Case, g: Given, product: Product) -> list[Tensor]:
    number = len(g.features)
    x = torch.cat([normalized(v, case["normalize"]) for v in g.features.values()])
    n = len(x)
    s = g.scale * product(x, x)
    instance = torch.arange(n // number, device=x.device).repeat(number)
    itself = torch.eye(n, dtype=torch.bool, device=x.device)
    alike = equal(instance, instance) & ~itself
    positives = s.masked_fill(~alike, 0.0).sum(1) / (number - 1)
    negative = lse(s, ~itself & ~alike)
    if case["call"] == "ntxent" and case["options"]["tau_plus"]:
        count = (~itself & ~alike).sum(1)
        negative = debiased(g, positives, negative, count, case["options"]["tau_plus"])
        return [(torch.logaddexp(negative, positives) - positives).mean()]
    if case["call"] == "ntxent":
        return [(lse(s, ~itself) - positives).mean()]
    if n == number:
        return [0.0 * s.sum()]
    weights: Tensor | float = 1.0
    if case["options"]["sigma"]:
        wide = x.detach().double()
        similarity = (wide[: n // 2] * wide[n // 2 :]).sum(1) / case["options"]["sigma"]
        weights = (2 - n // 2 * similarity.softmax(0)).to(s.dtype).repeat(2)
    return [(negative - weights * positives).mean()]


def supcon(case: Case, g: Given, product: Product) -> list[Tensor]:
    f = [normalized(v, case["normalize"]) for v in g.features.values()]
    s = g.scale * product(f[0], f[-1])
    labels = list(g.ids.values())
    counted = torch.ones_like(s, dtype=torch.bool)
    if len(f) == 1:
        counted.fill_diagonal_(False)
    positive = equal(labels[0], labels[-1]) & counted
    anchors = positive.any(1)
    if not anchors.any():
        return [0.0 * s.sum()]
    s, counted, positive = s[anchors], counted[anchors], positive[anchors]
    logp = s - lse(s, counted)[:, None]
    count = positive.sum(1).to(s.dtype)
    if case["options"]["form"] == "out":
        return [(-logp.masked_fill(~positive, 0.0).sum(1) / count).mean()]
    return [(count.log() - lse(logp, positive)).mean()]


def _inner(case: Case, s: Tensor, bias: Any) -> Tensor:
    return clip_of(s) if case["options"]["inner"] == "clip" else siglip_of(s + bias)


def matryoshka(case: Case, g: Given, product: Product) -> list[Tensor]:
    x, y = g.features["x"], g.features["y"]
    total = torch.zeros((), dtype=torch.float64, device=x.device)
    for dim, weight in zip(case["options"]["dims"], case["options"]["weights"], strict=True):
        a, b = (normalized(t[:, :dim], case["normalize"]) for t in (x, y))
        total = total + weight * _inner(case, g.scale * product(a, b), g.bias)
    return [total]


def multimodal(case: Case, g: Given, product: Product) -> list[Tensor]:
    o = case["options"]
    total: Any = 0.0
    for (a, b), weight in zip(o["pairs"], o["weights"], strict=True):
        x, y = g.features[a], g.features[b]
        have = torch.ones(len(x), dtype=torch.bool, device=x.device)
        for name in (a, b):
            have &= g.masks.get(name, have) if name != o["absent"] else torch.zeros_like(have)
        x, y = (normalized(t[have], case["normalize"]) for t in (x, y))
        s = g.scale * product(x, y)
        total = total + (weight * _inner(case, s, g.bias) if len(x) else 0.0 * s.sum())
    return [total]


def logsumexp(case: Case, g: Given, product: Product) -> list[Tensor]:
    s = _pair(case | {"normalize": False}, g, product)
    counted = torch.ones_like(s, dtype=torch.bool)
    return [lse(s, counted), lse(s.T, counted.T)][: 1 + (case["options"]["sides"] == "both")]


def split_logsumexp(case: Case, g: Given, product: Product) -> list[Tensor]:
    o, x = case["options"], g.features["x"]
    y = x if o["itself"] else g.features["y"]
    s = g.scale * product(x, y)
    counted = torch.ones_like(s, dtype=torch.bool)
    eye = torch.eye(*s.shape, dtype=torch.bool, device=s.device)
    if o["itself"]:
        counted &= ~eye
        alike = equal(g.ids["x"], g.ids["x"]) if g.ids else eye
    else:
        alike = equal(g.ids["x"], g.ids["y"]) if g.ids else eye
    positive = alike & counted
    negative = ~alike & counted
    if not o["itself"] and (o["positives"] == "paired" or not g.ids):
        positive, negative = eye, negative & ~eye
    limit = ceiling(case, g)
    if limit is not None:
        note_gaps(g, s.detach() - limit[:, None], negative)
        negative = negative & ~(s.detach() > limit[:, None])
    sides = [(s, positive, negative), (s.T, positive.T, negative.T)]
    return [
        part
        for m, p, n in sides[: 1 + (o["sides"] == "both")]
        for part in (lse(m, n), lse(m, p), m.masked_fill(~p, 0.0).sum(1), p.sum(1).to(m.dtype))
    ]


def softplus_sum(case: Case, g: Given, product: Product) -> list[Tensor]:
    s = _pair(case | {"normalize": False}, g, product) + g.bias
    eye = torch.eye(*s.shape, dtype=torch.bool, device=s.device)
    alike = equal(g.ids["x"], g.ids["y"]) if g.ids else eye
    losses = -F.logsigmoid(torch.where(alike, s, -s)).sum(1)
    return [(losses if g.weights is None else g.weights * losses).sum()]


def paired(case: Case, g: Given, product: Product) -> list[Tensor]:
    wide = torch.float64 if g.features["x"].dtype == torch.float64 else torch.float32
    return [g.scale * (g.features["x"].to(wide) * g.features["y"].to(wide)).sum(1)]


def ranks(case: Case, g: Given, product: Product) -> list[Tensor]:
    s = product(g.features["x"], g.features["y"])
    wanted = torch.cat([target(case, s[:n]) for n in case["rows"]])
    score = s.gather(1, wanted[:, None])
    skip = torch.zeros_like(s, dtype=torch.bool).scatter_(1, wanted[:, None], True)
    if g.ids:
        skip |= equal(g.ids["x"], g.ids["y"])
    return [((s > score) & ~skip).sum(1), ((s == score) & ~skip).sum(1)]


def topk(case: Case, g: Given, product: Product) -> list[Tensor]:
    """The scores, and the whole matrix instead of indices, of which several may be right."""
    s = product(g.features["x"], g.features["y"])
    if g.ids:
        s = s.masked_fill(equal(g.ids["x"], g.ids["y"]), -torch.inf)
    return [s.sort(1, descending=True).values[:, : case["options"]["k"]], s]


TRUTHS: dict[str, Callable[[Case, Given, Product], list[Tensor]]] = {
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
