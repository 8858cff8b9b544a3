"""sentence-transformers' ranking losses, without the similarity matrix.

    from megabatch.integrations.sentence_transformers import MegabatchRankingLoss

    loss = MegabatchRankingLoss(model, mini_batch_size=64)  # CachedMultipleNegativesRankingLoss

The classes here inherit from the library's own. Arguments and their meaning, gradient caching and
`MatryoshkaLoss` are unchanged; only the loss of the embeddings and its gradient come from
`megabatch.similarity`. Texts are encoded in order of length, so that the library's mini-batches
have little padding.
"""

from __future__ import annotations

import math
from collections.abc import Callable
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

from megabatch.integrations.cached_losses import Cached
from megabatch.losses.base import unit_rows
from megabatch.losses.maxsim import MaxSimLoss
from megabatch.losses.negatives import Logits, Rows, no_ids, similarity_limit
from megabatch.losses.terms import minus_log_probability
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


class MegabatchRankingLoss(Cached, CachedMultipleNegativesRankingLoss):
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


class MegabatchGISTEmbedLoss(Cached, CachedGISTEmbedLoss):
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


class MegabatchMultiVectorRankingLoss(Cached, _MultiVectorLoss):
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
