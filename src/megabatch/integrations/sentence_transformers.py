"""sentence-transformers' ranking losses, without the similarity matrix.

    from megabatch.integrations.sentence_transformers import MegabatchRankingLoss

    loss = MegabatchRankingLoss(model, mini_batch_size=64)  # CachedMultipleNegativesRankingLoss

The classes here inherit from the library's own. Arguments and their meaning, gradient caching and
`MatryoshkaLoss` are unchanged; only the loss of the embeddings and its gradient come from
`megabatch.similarity`. Texts are encoded in order of length, so that the library's mini-batches
have little padding.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from importlib.metadata import version
from typing import Any, Literal

import torch
from sentence_transformers.sentence_transformer.losses import (
    CachedGISTEmbedLoss,
    CachedMultipleNegativesRankingLoss,
    MultipleNegativesRankingLoss,
)
from sentence_transformers.util import cos_sim, dot_score
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from megabatch.gradient_cache.by_length import equal_tokens, fewest_micro_batches
from megabatch.losses.base import unit_rows
from megabatch.losses.maxsim import MaxSimLoss
from megabatch.losses.negatives import Logits, Rows, no_ids, similarity_limit
from megabatch.losses.terms import minus_log_probability
from megabatch.models.padding import MASKED_KINDS
from megabatch.similarity import global_mean, pair_ids, paired, split_logsumexp
from megabatch.similarity.arguments import accumulator_dtype, check_scalar, product_dtype

try:
    from sentence_transformers.multi_vector_encoder import scoring
    from sentence_transformers.multi_vector_encoder.losses import (
        CachedMultiVectorMultipleNegativesRankingLoss,
    )
    from sentence_transformers.util import cat_padded_token_embeddings

    _MultiVectorLoss: Any = CachedMultiVectorMultipleNegativesRankingLoss
except ImportError:  # before 6.0
    _MultiVectorLoss = object

#: Modules of sentence-transformers whose result for a text does not depend on its padding, after
#: a transformer that masks padding.
_ROW_BY_ROW = frozenset(
    {"Transformer", "Pooling", "Dense", "LayerNorm", "Dropout", "Normalize", "WeightedLayerPooling"}
    | {"MultiVectorMask"}
)


class _Cached:
    """For the library's cached losses: each column of texts is encoded in order of their lengths.

    The library cuts a batch into mini-batches in the batch's order, and each of them to its longest
    text (from release 6.0 on). In a large batch nearly every mini-batch has a long text; sorted,
    most have short ones alone. The longest come first, so the first mini-batch needs the most
    memory. `mini_batch_num_tokens` then counts padding as well, so mini-batches are even. The loss
    gets the embeddings in the batch's own order.
    """

    model: Any
    mini_batch_num_tokens: Any
    _places: Sequence[Tensor | None] = ()  # of the batch's rows among the sorted ones, by column
    _sorted_masks: Sequence[Tensor] = ()  # of columns whose mini-batches are divided here

    def __init__(
        self,
        *args: Any,
        sort_by_length: bool | None = None,
        kept_mini_batches: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        if not isinstance(kept_mini_batches, int) or kept_mini_batches < 0:
            raise ValueError(
                f"kept_mini_batches: expected an integer from 0 on, got {kept_mini_batches!r}"
            )
        if kept_mini_batches and hasattr(self, "guide"):
            # Whose embeddings the library's passes with gradients leave out.
            raise ValueError(
                f"kept_mini_batches: expected 0 with a guide model, got {kept_mini_batches}"
            )
        encode: Any = super().embed_minibatch_iter  # type: ignore[misc]
        if kept_mini_batches and "ranges" not in inspect.signature(encode).parameters:
            raise ValueError(
                f"kept_mini_batches: expected 0 with sentence-transformers "
                f"{version('sentence-transformers')}, got {kept_mini_batches}: this release does "
                "not say which mini-batches a second pass has"
            )
        self.kept_mini_batches = kept_mini_batches
        encoders = self.model, getattr(self, "guide", self.model)
        masked = all(map(_masks_padding, encoders))
        self.sort_by_length = masked if sort_by_length is None else sort_by_length

    def forward(
        self, sentence_features: Iterable[dict[str, Any]], labels: Tensor | None = None
    ) -> Tensor:
        """The loss of tokenized texts, one dictionary for each column; labels are not used."""
        columns, self._are_in_batch_order = list(sentence_features), False
        if self.sort_by_length and columns:
            columns, self._places = map(list, zip(*map(_sorted_by_length, columns), strict=True))
            if getattr(self, "mini_batch_num_tokens", None):
                pairs = zip(columns, self._places, strict=True)
                self._sorted_masks = [c["attention_mask"] for c, p in pairs if p is not None]
        try:
            loss: Tensor = super().forward(columns, labels)  # type: ignore[misc]
        finally:
            self._places = self._sorted_masks = ()
        if not self._are_in_batch_order:  # the library's own loss would pair sorted texts
            raise RuntimeError(
                f"{type(self).__name__}: this release of sentence-transformers computes the loss "
                "elsewhere than in calculate_loss, which is replaced here; 5.4 to 6.2 were tested"
            )
        return loss

    def embed_minibatch_iter(self, *args: Any, **given: Any) -> Iterator[Any]:
        """The library's generator of the embeddings of a column's mini-batches."""
        ranges, mask = given.get("ranges"), given.get("sentence_feature", {}).get("attention_mask")
        if ranges and any(mask is each for each in self._sorted_masks):
            limit = self.mini_batch_num_tokens
            widths = mask.sum(1).clamp(min=1).unique_consecutive(return_counts=True)
            runs = [*zip(*(each.tolist() for each in widths), strict=True)]
            parts = equal_tokens(runs, fewest_micro_batches(runs, limit), limit)
            # In place, for the second pass as well.
            ranges[:] = [(part.start, part.stop) for part in parts]
        encode: Any = super().embed_minibatch_iter  # type: ignore[misc]
        if not (self.kept_mini_batches and torch.is_grad_enabled()):
            return encode(*args, **given)
        return (self._first if given.get("random_states") is None else _second)(encode, **given)

    def _first(self, encode: Any, ranges: Sequence[Any], **given: Any) -> Iterator[Any]:
        """The items of a first pass; those with a graph wait in the place of random states."""
        count = min(self.kept_mini_batches, len(ranges))
        alone: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        model = getattr(self.model, "_orig_mod", self.model)
        if isinstance(model, DistributedDataParallel):
            # Gradients are averaged with the last mini-batch, which DDP prepares in its second
            # forward pass.
            count, alone = min(count, len(ranges) - 1), model.no_sync()
            if model.static_graph:
                raise ValueError(
                    "kept_mini_batches: expected 0 with DDP's static graph, got "
                    f"{self.kept_mini_batches}"
                )
        with alone:
            for item in encode(ranges=ranges[:count], **{**given, "with_grad": True}):
                yield (*item[:-1], _Kept(item))
        yield from encode(ranges=ranges[count:], **given)

    def _in_batch_order(self, columns: Iterable[Tensor]) -> list[Tensor]:
        """Embeddings or masks (rows, ...) of whole columns, from those of the sorted texts."""
        self._are_in_batch_order = True
        columns = list(columns)
        places = self._places or (None,) * len(columns)
        return [
            column if place is None else column.index_select(0, place)
            for column, place in zip(columns, places, strict=True)
        ]


@dataclass(frozen=True)
class _Kept:
    """A mini-batch's embeddings with their graph, and what the library gives beside them."""

    item: tuple[Any, ...]


def _second(
    encode: Any, ranges: Sequence[Any], random_states: list[Any], **given: Any
) -> Iterator[Any]:
    """The items of a second pass, the first ones from the first pass."""
    count = sum(isinstance(state, _Kept) for state in random_states)
    for i in range(count):
        item = random_states[i].item
        random_states[i] = item[-1]  # so the graph goes, and another pass would encode it again
        yield item
    yield from encode(ranges=ranges[count:], random_states=random_states[count:], **given)


def _sorted_by_length(features: dict[str, Any]) -> tuple[dict[str, Any], Tensor | None]:
    """A column's tensors with the longest texts first, and each text's place among them.

    Inputs that are not one row of tokens for each text stay as they are: flattened ones, images.
    """
    mask = features.get("attention_mask")
    tensors = [value for value in features.values() if isinstance(value, Tensor)]
    if mask is None or any(t.ndim not in (1, 2) or len(t) != len(mask) for t in tensors):
        return features, None
    order = mask.sum(1).argsort(descending=True, stable=True)
    rows = {k: v[order] if isinstance(v, Tensor) else v for k, v in features.items()}
    return rows, order.argsort()


def _masks_padding(model: Any) -> bool:
    """Whether embeddings of a sentence encoder are known not to depend on padding."""
    modules = list(model) if isinstance(model, torch.nn.Sequential) else []
    config = getattr(getattr(modules[0], "auto_model", None), "config", None) if modules else None
    masked = getattr(config, "model_type", None) in MASKED_KINDS
    return masked and all(type(m).__name__ in _ROW_BY_ROW for m in modules)


class MegabatchRankingLoss(_Cached, CachedMultipleNegativesRankingLoss):
    """`CachedMultipleNegativesRankingLoss` at any batch size.

    Args:
        args, kwargs: those of the installed library's `CachedMultipleNegativesRankingLoss`, with
            the same meaning and defaults. `similarity_fct` must be `cos_sim` or `dot_score` of
            `sentence_transformers.util`. `show_progress_bar` shows the progress of encoding only,
            since the loss itself has no loop.
        sort_by_length: encode the texts of each column in order of length, so that mini-batches
            have little padding. Embeddings change only by rounding; with dropout, a text gets
            different random numbers. None: sort for encoders that mask padding (BERT, RoBERTa,
            MPNet, ModernBERT and similar).
        kept_mini_batches: so many of each column's mini-batches are encoded once: their activations
            wait for the backward pass, in so much more memory. The result is the same.

    Raises:
        ValueError: the library's reasons, or another `similarity_fct`; `kept_mini_batches` is no
            number, or not 0 with a release of the library before 6.0 or DDP's static graph.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _is_cosine(self.similarity_fct)

    def calculate_loss(
        self,
        reps: list[list[Tensor]],
        labels: Tensor | None = None,
        *,
        with_backward: bool = False,
    ) -> Tensor:
        """The loss of a batch's embeddings, one list of mini-batches for each column.

        The library calls it once for each batch and, inside `MatryoshkaLoss`, once for each width.

        Args:
            reps: embeddings (rows, d). labels: not used.
            with_backward: backpropagate to the embeddings, and return the loss without a graph.
        """
        embeddings = self._in_batch_order(map(torch.cat, reps))
        return _finished(ranking_loss(self, embeddings), with_backward)


class UncachedMegabatchRankingLoss(MultipleNegativesRankingLoss):
    """`MultipleNegativesRankingLoss` at any batch size whose activations fit into memory.

    For models that do not work with gradient caching, such as those with a `StaticEmbedding`.

    Args:
        args, kwargs: those of the installed library's `MultipleNegativesRankingLoss`; see
            `MegabatchRankingLoss`.

    Raises:
        ValueError: the library's reasons, or another `similarity_fct`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _is_cosine(self.similarity_fct)

    def compute_loss_from_embeddings(
        self, embeddings: list[Tensor], labels: Tensor | None = None
    ) -> Tensor:
        """The loss of embeddings (rows, d), one tensor for each column; labels are not used."""
        return ranking_loss(self, embeddings)


class MegabatchGISTEmbedLoss(_Cached, CachedGISTEmbedLoss):
    """`CachedGISTEmbedLoss` at any batch size: a guide model leaves out false negatives.

    Args:
        args, kwargs: those of the installed library's `CachedGISTEmbedLoss`, with the same
            meaning and defaults; `show_progress_bar` as in `MegabatchRankingLoss`.
        sort_by_length: see there. None: sort if both encoders mask padding.

    Raises:
        ValueError: the library's reasons, or `kept_mini_batches` is given.
    """

    def calculate_loss(
        self,
        reps: list[list[Tensor]],
        reps_guided: list[list[Tensor]],
        *,
        with_backward: bool = False,
    ) -> Tensor:
        """The loss of a batch's embeddings, as in `MegabatchRankingLoss`.

        Args:
            reps: embeddings (rows, d). reps_guided: the guide's, (rows, d') of any width.
            with_backward: see there.
        """
        embeddings, guides = (
            self._in_batch_order(map(torch.cat, each)) for each in (reps, reps_guided)
        )
        return _finished(guided_loss(self, embeddings, guides), with_backward)


class MegabatchMultiVectorRankingLoss(_Cached, _MultiVectorLoss):
    """`CachedMultiVectorMultipleNegativesRankingLoss` at any batch size: late interaction.

    Args:
        args, kwargs: those of the installed library's class, with the same meaning and defaults.
            `similarity_fct` must be `colbert_scores` or `mean_colbert_scores`. Scores are never
            stored, so `score_mini_batch_size` has no effect; `show_progress_bar` as in
            `MegabatchRankingLoss`.
        sort_by_length, kept_mini_batches: see there.

    Raises:
        ImportError: a release of sentence-transformers before 6.0.
        ValueError: the library's reasons, or another `similarity_fct`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if _MultiVectorLoss is object:
            raise ImportError(
                f"{type(self).__name__}: expected sentence-transformers 6.0 or newer, got "
                f"{version('sentence-transformers')}, which has no multi-vector encoders"
            )
        super().__init__(*args, **kwargs)
        _score(self.similarity_fct)

    def calculate_loss(
        self,
        reps: list[list[Tensor]],
        masks_chunks: list[list[Tensor]],
        *,
        with_backward: bool = False,
    ) -> Tensor:
        """The loss of a batch's embeddings, as in `MegabatchRankingLoss`.

        Args:
            reps: embeddings (rows, tokens, d). masks_chunks: (rows, tokens) each, true for tokens
                that count. Numbers of tokens may differ between mini-batches.
            with_backward: see there.
        """
        columns = map(cat_padded_token_embeddings, reps, masks_chunks)
        tokens, masks = map(self._in_batch_order, zip(*columns, strict=True))
        return _finished(multi_vector_loss(self, tokens, masks), with_backward)


def _finished(loss: Tensor, with_backward: bool) -> Tensor:
    if with_backward:
        loss.backward()
    return loss.detach() if with_backward else loss


def ranking_loss(settings: Any, embeddings: list[Tensor]) -> Tensor:
    """The library's ranking loss: the mean over queries of -log softmax at their positives.

    Args:
        settings: an object with the attributes of `MultipleNegativesRankingLoss`.
        embeddings: (b, d) each: queries, their positives, and any number of columns of negatives.

    Returns:
        A scalar in float32 (float64 for float64 embeddings). With `gather_across_devices`, the mean
        over ranks is the mean over all queries.

    Raises:
        ValueError: there are fewer than two columns; `similarity_fct` is not supported.
    """
    queries, *documents = _operands(embeddings, _is_cosine(settings.similarity_fct))
    group = None if settings.gather_across_devices else "local"
    positive, negatives = _logits(settings, queries, documents, group)
    if settings.partition_mode == "joint":
        # The library's document-to-query scores include the positive pair once more.
        copies = math.log(2 if "doc_to_query" in settings.directions else 1)
        joint = reduce(torch.logaddexp, negatives)
        losses = copies + minus_log_probability(positive + copies, joint)
    else:
        each = [minus_log_probability(positive, direction) for direction in negatives]
        losses = torch.stack(each).mean(0)
    return global_mean(losses, group, name="queries")


def guided_loss(settings: Any, embeddings: list[Tensor], guides: list[Tensor]) -> Tensor:
    """The library's guided loss: InfoNCE with other queries and positives as further negatives.

    Negatives that the guide finds more similar than the query and its positive, less a margin, are
    left out.

    Args:
        settings: an object with the attributes of `CachedGISTEmbedLoss`.
        embeddings: (b, d) each, as for `ranking_loss`. guides: the guide's, (b, d') each.

    Returns:
        A scalar, as `ranking_loss`.

    Raises:
        ValueError: there are fewer than two columns.
    """
    queries, *documents = _operands(embeddings, cosine=True)
    dtype = accumulator_dtype(queries.dtype)
    guide_queries, *guide_documents = (unit_rows(guide.detach(), dtype) for guide in guides)
    group = None if settings.gather_across_devices else "local"
    query, positive = Rows(queries, guide_queries), Rows(documents[0], guide_documents[0])
    limit = similarity_limit(query, positive, -settings.margin, settings.margin_strategy)
    sweep = partial(split_logsumexp, scale=1 / settings.temperature, ceiling=limit, sides="rows")

    positives, *negatives = documents
    query_ids = pair_ids(len(queries), group, device=queries.device)
    candidates = torch.cat(documents), torch.cat(guide_documents)
    others = [no_ids(Rows(column, None)) for column in negatives]
    ids = query_ids, torch.cat([query_ids, *others])
    guide = guide_queries, candidates[1]
    rows, _ = sweep(queries, candidates[0], ids=ids, guide=guide, group=group)
    parts = [rows.negative]
    if settings.contrast_anchors:  # the library gathers no queries
        parts.append(sweep(queries, guide=guide_queries, group="local")[0].negative)
    if settings.contrast_positives:
        parts.append(sweep(positives, guide=guide_documents[0], group=group)[0].negative)
    losses = minus_log_probability(rows.positive_sum, reduce(torch.logaddexp, parts))
    return global_mean(losses, group, name="queries")


def multi_vector_loss(settings: Any, tokens: list[Tensor], masks: list[Tensor]) -> Tensor:
    """The library's multi-vector ranking loss: late interaction with all documents of the batch.

    Args:
        settings: an object with the attributes of `CachedMultiVectorMultipleNegativesRankingLoss`.
        tokens: (b, l, d) each, as for `ranking_loss`; l may differ.
        masks: (b, l) each, true for tokens that count.

    Returns:
        A scalar, as `ranking_loss`.

    Raises:
        ValueError: there are fewer than two columns; `similarity_fct` is not supported.
    """
    _check_columns(tokens)
    score = _score(settings.similarity_fct)
    group = None if settings.gather_across_devices else "local"
    loss = MaxSimLoss(1 / settings.scale, score=score, group=group)
    further = cat_padded_token_embeddings(tokens[2:], masks[2:]) if len(tokens) > 2 else ()
    return loss(*tokens[:2], *masks[:2], *further)


def _operands(embeddings: list[Tensor], cosine: bool) -> list[Tensor]:
    """Queries, positives and negatives in the dtype of the products, normalised for the cosine."""
    _check_columns(embeddings)
    dtypes = [product_dtype(column) for column in embeddings]
    return [
        unit_rows(column, dtype) if cosine else column.to(dtype)
        for column, dtype in zip(embeddings, dtypes, strict=True)
    ]


def _check_columns(embeddings: list[Tensor]) -> None:
    if len(embeddings) < 2:
        raise ValueError(
            f"embeddings: expected queries, positives and any negatives, got {len(embeddings)}"
        )


def _is_cosine(similarity_fct: Callable[..., Tensor]) -> bool:
    """Whether the similarity is the cosine, and not the dot product."""
    if similarity_fct not in (cos_sim, dot_score):
        raise ValueError(
            "similarity_fct: expected cos_sim or dot_score of sentence_transformers.util, got "
            f"{_name(similarity_fct)}: other similarities are not products of the embeddings"
        )
    return similarity_fct is cos_sim


def _score(similarity_fct: Callable[..., Tensor]) -> Literal["sum", "mean"]:
    """How products of tokens make a score, as `MaxSimLoss` names it."""
    if similarity_fct not in (scoring.colbert_scores, scoring.mean_colbert_scores):
        raise ValueError(
            "similarity_fct: expected colbert_scores or mean_colbert_scores of "
            "sentence_transformers.multi_vector_encoder.scoring, got "
            f"{_name(similarity_fct)}: other scores are not sums of largest products"
        )
    return "sum" if similarity_fct is scoring.colbert_scores else "mean"


def _name(function: Callable[..., Tensor]) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _logits(
    settings: Any, queries: Tensor, documents: list[Tensor], group: object
) -> tuple[Tensor, list[Tensor]]:
    """The positives' logits, and of each direction the negatives' log-sum-exp; (b,) each."""
    directions, mode = settings.directions, settings.hardness_mode
    hard = documents[1:]
    query, positives = Rows(queries, None), Rows(documents[0], None)
    candidates = Rows(torch.cat(documents), None)
    query_ids = pair_ids(len(queries), group, device=queries.device)
    of_query = query_ids.repeat(len(documents))  # the query that each candidate belongs to
    scale = check_scalar("scale", settings.scale, queries)
    plain = Logits(scale, None, group)
    weighted = Logits(scale, None, group, settings.hardness_strength) if mode else plain
    in_batch = weighted if mode in ("in_batch_negatives", "all_negatives") else plain
    of_hard = weighted if mode in ("hard_negatives", "all_negatives") else plain
    # Weights are for queries only: a sweep without any also serves the documents' direction.
    sides = "both" if "doc_to_query" in directions and in_batch is plain else "rows"

    if in_batch is of_hard or not hard:
        others = [no_ids(Rows(column, None)) for column in hard]
        ids = (query_ids, torch.cat([query_ids, *others])) if hard else "paired"
        rows, columns = in_batch.split(query, candidates, ids=ids, sides=sides)
        positive, negatives = rows.positive_sum, [rows.negative]
    else:
        rows, columns = in_batch.split(query, candidates, ids=(query_ids, of_query), sides=sides)
        over_hard = of_hard.over_hard(query, Rows(torch.stack(hard, 1), None))
        positive = paired(queries, documents[0], scale)
        negatives = [torch.logaddexp(rows.negative, over_hard)]
    if columns is not None:
        negatives.append(columns.negative[: len(queries)])
    elif "doc_to_query" in directions:
        negatives.append(plain.split(positives, query)[0].negative)
    if "query_to_query" in directions:
        negatives.append(plain.split(query, None)[0].negative)
    if "doc_to_doc" in directions and not hard:
        negatives.append(plain.split(positives, None)[0].negative)
    elif "doc_to_doc" in directions:
        ids = query_ids, of_query
        negatives.append(plain.split(positives, candidates, ids=ids)[0].negative)
    return positive, negatives
