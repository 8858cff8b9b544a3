"""InfoNCE (van den Oord et al. 2018, arXiv 1807.03748) for retrieval, at any batch size."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from functools import reduce
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor

from megabatch.losses.arguments import (
    check_choice,
    check_flag,
    check_ids,
    check_number,
    check_pairs,
    check_weights,
)
from megabatch.losses.base import TemperatureLoss, unit_rows
from megabatch.losses.negatives import (
    Logits,
    Rows,
    check_guides,
    check_log_q,
    hard_products,
    no_ids,
    similarity_limit,
    sum_of_candidates,
)
from megabatch.losses.terms import debiased, minus_log_probability
from megabatch.similarity import Split, global_mean, pair_ids
from megabatch.similarity.arguments import check_dense, check_same_rows, check_two

HardnessMode: TypeAlias = Literal["in_batch_negatives", "hard_negatives", "all_negatives"]

#: Settings that cannot be combined with some others, and their values if they are not used.
UNUSED = {
    "margin": None, "same_tower": (), "reverse": None, "hardness_mode": None,
    "label_smoothing": 0.0, "tau_plus": 0.0,
}  # fmt: skip


class InfoNCELoss(TemperatureLoss):
    """Each query against its own positive, with all other queries' positives as negatives.

    Further negatives can join the same softmax: shared ones, each query's own, a queue, rows of
    the same tower. With `margin=0.1` and `same_tower=("query", "positive")` this is the loss of
    Qwen3-Embedding (arXiv 2506.05176); with `margin=0.0`, the same towers and the features of a
    guide model, GISTEmbed's (arXiv 2402.16829).

    Args:
        temperature: see `TemperatureLoss`.
        margin: leave out a negative as a false one if its similarity exceeds that of query and
            positive by more than this, before the temperature; negative numbers leave out more.
            One that exceeds the limit only by rounding, as a copy of the positive may, is kept.
            None: all are kept.
        margin_strategy: "absolute", or "relative": the margin is a fraction of the absolute
            similarity of query and positive.
        same_tower: any of "query" (compare each query with all other queries too) and "positive"
            (its positive with all other positives; Li et al. 2023, arXiv 2308.03281).
        reverse: None: the loss has one direction. "joint": the softmax of a query also contains the
            logits of all queries with its positive, so that the pair itself counts twice; with
            both names in `same_tower` this is the loss of GTE (Li et al. 2023). "separate": those
            logits have a softmax of their own, and the loss of a pair is the mean of the two; this
            excludes `same_tower`.
        share_negatives: use each query's own negatives (b, k, d) as negatives of all other queries
            too and, with "positive" in `same_tower`, of their positives.
        hardness_mode: which negatives of a query are weighted, as in sentence-transformers.
            "in_batch_negatives": all except its own (Lan et al. 2025, arXiv 2503.04812).
            "hard_negatives": its own (b, k, d) (Schechter Vera et al. 2025, arXiv 2509.20354).
            "all_negatives": both, but none that `same_tower` or `reverse` adds.
        hardness_strength: a >= 0 in the weight e^(a c) of a negative of similarity c, which gets no
            gradient. The papers use 9 and 5.
        label_smoothing: from 0 to below 1; this share of each target is spread evenly over all
            candidates of the softmax, the positive and all negatives.
        tau_plus: the probability that a negative is a false one, see `NTXentLoss`. This and label
            smoothing cannot be combined with each other, nor with `margin`, `same_tower`,
            `reverse`, `hardness_mode` or `ids`, with which candidates differ in number or meaning.
        normalize, group: see `ContrastiveLoss`; negatives, queue and guide are normalised too.
    """

    #: Arguments of `forward` that `MatryoshkaLoss` leaves whole.
    whole = ("guide_query", "guide_positive", "guide_negatives", "guide_queue", "log_q_negatives")

    def __init__(
        self,
        temperature: float | Tensor,
        *,
        margin: float | None = None,
        margin_strategy: Literal["absolute", "relative"] = "absolute",
        same_tower: Collection[str] = (),
        reverse: Literal["joint", "separate"] | None = None,
        share_negatives: bool = False,
        hardness_mode: HardnessMode | None = None,
        hardness_strength: float = 0.0,
        label_smoothing: float = 0.0,
        tau_plus: float = 0.0,
        normalize: bool = False,
        group: object = None,
    ) -> None:
        super().__init__(temperature, normalize=normalize, group=group)
        if isinstance(same_tower, str):
            raise TypeError(f"same_tower: expected a collection of names, got {same_tower!r}")
        self.margin = None if margin is None else check_number("margin", margin)
        strategies = "absolute", "relative"
        self.margin_strategy = check_choice("margin_strategy", margin_strategy, strategies)
        self.same_tower = tuple(same_tower)
        for name in self.same_tower:
            check_choice("same_tower", name, ("query", "positive"))
        if len(set(self.same_tower)) < len(self.same_tower):
            raise ValueError(f"same_tower: expected each name once, got {self.same_tower}")
        self.reverse = check_choice("reverse", reverse, (None, "joint", "separate"))
        if reverse == "separate" and self.same_tower:
            raise ValueError(
                "reverse: expected None or 'joint' with same_tower, whose rows join one softmax, "
                "got 'separate'"
            )
        self.share_negatives = check_flag("share_negatives", share_negatives)
        modes = None, *get_args(HardnessMode)
        self.hardness_mode = check_choice("hardness_mode", hardness_mode, modes)
        not_negative = "a finite, non-negative number"
        self.hardness_strength = check_number("hardness_strength", hardness_strength, not_negative)
        if self.hardness_strength and hardness_mode is None:
            raise ValueError(
                f"hardness_strength: expected 0 with hardness_mode=None, got {hardness_strength}; "
                "a mode says which negatives are weighted"
            )
        self.label_smoothing = check_number("label_smoothing", label_smoothing, "0 to below 1")
        self.tau_plus = check_number("tau_plus", tau_plus, "0 to below 1")
        if self.label_smoothing:
            self._refuse_with([*UNUSED][:4], "label_smoothing", "0", label_smoothing)
        if self.tau_plus:
            self._refuse_with([*UNUSED][:5], "tau_plus", "0", tau_plus)

    def forward(
        self,
        query: Tensor,
        positive: Tensor,
        negatives: Tensor | None = None,
        *,
        queue: Tensor | None = None,
        ids: Tensor | None = None,
        weights: Tensor | None = None,
        temperature: float | Tensor | None = None,
        guide_query: Tensor | None = None,
        guide_positive: Tensor | None = None,
        guide_negatives: Tensor | None = None,
        guide_queue: Tensor | None = None,
        log_q: Tensor | None = None,
        log_q_negatives: Tensor | None = None,
        log_q_queue: Tensor | None = None,
    ) -> Tensor:
        """The mean loss over queries; 0 for a query without negatives, log 2 if reverse="joint".

        See `ContrastiveLoss` for dtypes and errors.

        Args:
            query, positive: (b, d).
            negatives: (k, d), negatives of every query of all processes; or (b, k, d), k for each
                query alone. Unless they are shared, the latter take O(b·k) additional memory.
            queue: (q, d), negatives that are the same on every process, such as MoCo's memory (He
                et al. 2019, arXiv 1911.05722); no gradient flows into it.
            ids, weights: as for `ClipLoss`; pairs of equal ids (the same document) are left out of
                each other's negatives.
            temperature: for this call, instead of the constructor's.
            guide_query, guide_positive, guide_negatives, guide_queue: another model's features of
                the same rows, of any width d', for all inputs that are given or for none. The
                margin then applies to their similarities instead of the trained model's. Any
                floating-point dtype, but float64 if and only if `query` is; autocast does not cast
                them; no gradient flows into them.
            log_q: (b,) logarithms of the positives' probabilities of being sampled into a batch,
                up to a constant, such as an item's share of all interactions. They are subtracted
                from the logits of all candidates, the positive's own included, so that frequent
                items are not held down for being frequent negatives (Yi et al. 2019, "Sampling-
                bias-corrected neural modeling"; Bengio and Senecal 2008). A margin still compares
                similarities, by products of their own. Not with `same_tower`, `reverse`,
                `hardness_mode`, `label_smoothing` or `tau_plus`. Differentiable.
            log_q_negatives, log_q_queue: the same of `negatives`, (k,) or (b, k), and of `queue`,
                (q,); required with `log_q`.
        """
        check_pairs(query, positive, ("query", "positive"))
        self._check_candidates(query, negatives, ids)
        if queue is not None:
            check_two(query, queue, ("query", "queue"))
            queue = queue.detach()
        guides = guide_query, guide_positive, guide_negatives, guide_queue
        check_guides((query, positive, negatives, queue), guides, self.margin)
        corrections = check_log_q(positive, negatives, queue, (log_q, log_q_negatives, log_q_queue))
        if log_q is not None:
            self._refuse_with([*UNUSED][1:], "log_q", "None", "a tensor")
        weights = check_weights(weights, query)
        given = zip((query, positive, negatives, queue), guides, (None, *corrections), strict=True)
        rows: list[Any] = [None if t is None else self._rows(t, g, q) for t, g, q in given]
        if log_q is not None and self.margin is not None and guide_query is None:
            # The margin is about similarities: without the correction.
            rows = [None if r is None else r._replace(guide=r.features.detach()) for r in rows]
        scale, ids = self._scale(temperature, query), check_ids(ids, query, self.group)
        losses = self._losses(rows[0], rows[1], rows[2], rows[3], scale, ids)
        for guide in guides:
            if guide is not None:  # a NaN drops no pair, which would pass for a plausible loss
                losses = losses + 0 * guide.detach().sum(dtype=losses.dtype)
        return global_mean(losses, self.group, weights, name="query")

    def _rows(self, features: Tensor, guide: Tensor | None, log_q: Tensor | None) -> Rows:
        """Prepare features and the guide's, which keep their dtype; normalise both if asked to."""
        if guide is not None:
            guide = guide.detach()
            guide = unit_rows(guide, guide.dtype) if self.normalize else guide
        return Rows(self._operand(features), guide, log_q=log_q)

    def _losses(
        self,
        query: Rows,
        positive: Rows,
        negatives: Rows | None,
        queue: Rows | None,
        scale: Tensor,
        ids: Tensor | None,
    ) -> Tensor:
        """The loss of each query, (b,)."""
        plain, in_batch, of_hard = self._logits(query, positive, scale)
        per_query = negatives is not None and negatives.features.dim() > query.features.dim()
        shared, hard = (None, negatives) if per_query else (negatives, None)
        further = self._same_tower(plain, query, positive, hard, ids)
        if hard is not None and self.share_negatives and in_batch is of_hard:
            # They all count equally, so it does not matter whose they are.
            shared, hard = hard.flat(), None
        if hard is not None:
            further.append(of_hard.over_hard(query, hard))
            if self.share_negatives:
                further.append(in_batch.over_hard_of_others(query, hard))
        if queue is not None:
            further.append(in_batch.over_all(query, queue, "local"))

        candidates, pairs = positive, {}
        if ids is not None:
            pairs = {"ids": (ids, ids), "positives": "paired"}
            if shared is not None:
                further.append(in_batch.over_all(query, shared, self.group))
        elif shared is not None:
            # Columns of the same matrix: one sweep, one rounding of the queries' gradient.
            candidates = positive.followed_by(shared)
            row_ids = pair_ids(len(query.features), self.group, device=query.features.device)
            pairs = {"ids": (row_ids, torch.cat([row_ids, no_ids(shared)]))}
        # The sweep's columns serve the other direction where nothing differs but the side.
        both = self.reverse is not None and in_batch is plain and plain.ceiling is None
        rows, back = in_batch.split(query, candidates, sides="both" if both else "rows", **pairs)
        rows = rows._replace(negative=reduce(torch.logaddexp, further, rows.negative))
        if self.reverse is not None:
            if back is None:
                back, _ = plain.split(positive, query, **({} if ids is None else pairs))
            return self._both_directions(rows, back)
        return self._one_direction(rows, scale, query, candidates, hard, queue)

    def _logits(self, query: Rows, positive: Rows, scale: Tensor) -> tuple[Logits, ...]:
        """The logits of unweighted, of in-batch and of hard negatives."""
        limit, guided = None, query.guide is not None
        if self.margin is not None:
            limit = similarity_limit(query, positive, self.margin, self.margin_strategy)
        plain = Logits(scale, limit, self.group, guided=guided)
        weighted = Logits(scale, limit, self.group, self.hardness_strength, guided=guided)
        in_batch = self.hardness_mode in ("in_batch_negatives", "all_negatives")
        hard = self.hardness_mode in ("hard_negatives", "all_negatives")
        return plain, weighted if in_batch else plain, weighted if hard else plain

    def _same_tower(
        self, logits: Logits, query: Rows, positive: Rows, hard: Rows | None, ids: Tensor | None
    ) -> list[Tensor]:
        """Log-sum-exps over the other rows of the same tower, a list of (b,)."""
        same = "paired" if ids is None else ids
        further = []
        if "query" in self.same_tower:
            further.append(logits.split(query, None, ids=same)[0].negative)
        if "positive" in self.same_tower:
            further.append(logits.split(positive, None, ids=same)[0].negative)
            if hard is not None and self.share_negatives:
                further.append(logits.over_hard_of_others(positive, hard))
        return further

    def _one_direction(
        self,
        rows: Split,
        scale: Tensor,
        query: Rows,
        candidates: Rows,
        hard: Rows | None,
        queue: Rows | None,
    ) -> Tensor:
        """Losses of the queries from their positives and log-sum-exps of all negatives, (b,)."""
        positive, negative = rows.positive_sum, rows.negative
        if self.tau_plus:
            own, others = (None if r is None else r.features for r in (hard, queue))
            _, number = sum_of_candidates(candidates.features, own, others, self.group)
            negative = debiased(positive, negative, scale, number - 1, self.tau_plus)
        losses = minus_log_probability(positive, negative)
        if self.label_smoothing:
            # This share of the target moves from the positive to all candidates equally.
            mean = self._mean_logit(scale, query, candidates, hard, queue)
            losses = losses + self.label_smoothing * (positive - mean)
        return losses

    def _mean_logit(
        self, scale: Tensor, query: Rows, candidates: Rows, hard: Rows | None, queue: Rows | None
    ) -> Tensor:
        """The mean of each query's logits over all candidates, (b,)."""
        own, others = (None if r is None else r.features for r in (hard, queue))
        total, number = sum_of_candidates(candidates.features, own, others, self.group)
        products = hard_products(query.features, total.expand(len(query.features), 1, -1))[:, 0]
        if own is not None:
            products = products + hard_products(query.features, own).sum(1)
        return scale * products / number

    def _both_directions(self, rows: Split, back: Split) -> Tensor:
        """Losses of the pairs, (b,). `back`: the documents against all queries, positives first."""
        back = Split(*(part[: len(rows.negative)] for part in back))
        if self.reverse == "separate":
            losses = minus_log_probability(rows.positive_sum, rows.negative)
            return (losses + minus_log_probability(back.positive_sum, back.negative)) / 2
        # The positive is a term of both directions: its exponential is in the sum twice.
        negative = torch.logaddexp(rows.negative, back.negative)
        return minus_log_probability(rows.positive_sum + math.log(2), negative) + math.log(2)

    def _refuse_with(self, settings: Sequence[str], name: str, expected: str, came: object) -> None:
        """Raise a ValueError about `name` if one of these settings is used."""
        for setting in settings:
            value = getattr(self, setting)
            if value != UNUSED[setting]:
                raise ValueError(
                    f"{name}: expected {expected} with {setting}={value!r}, got {came}"
                )

    def _check_candidates(
        self, query: Tensor, negatives: Any, ids: Any, name: str = "query", own: str = "(b, k, d)"
    ) -> None:
        """Negatives: None, each query's `own`, or without the first dimension negatives of all."""
        if ids is not None:
            self._refuse_with([*UNUSED][4:], "ids", "None", "ids")
        if negatives is None:
            return
        shared, is_tensor = "(" + own.removeprefix("(b, "), isinstance(negatives, Tensor)
        if not is_tensor or negatives.dim() - query.dim() not in (0, 1):
            came = tuple(negatives.shape) if is_tensor else type(negatives).__name__
            error = ValueError if is_tensor else TypeError
            raise error(f"negatives: expected a tensor of shape {shared} or {own}, got {came}")
        check_dense("negatives", negatives)
        of_query, names = negatives.dim() > query.dim(), (name, "negatives")
        rows = negatives.flatten(0, 1) if of_query else negatives
        check_two(query, rows, names, tokens=query.dim() == 3)
        if of_query:
            check_same_rows(query, negatives, names)
        elif self.share_negatives or self.hardness_mode == "hard_negatives":
            setting = "share_negatives" if self.share_negatives else "hardness_mode"
            raise ValueError(
                f"negatives: expected each query's own {own} with {setting}="
                f"{getattr(self, setting)!r}, got shape {tuple(negatives.shape)}"
            )
