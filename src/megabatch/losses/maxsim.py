"""Late interaction: the contrastive loss of multi-vector retrieval, at any batch size."""

from __future__ import annotations

import itertools
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from megabatch.losses.arguments import check_choice, check_ids, check_weights
from megabatch.losses.infonce import HardnessMode, InfoNCELoss
from megabatch.losses.negatives import Logits, Rows, similarities
from megabatch.similarity import global_mean, largest_over_ranks
from megabatch.similarity.arguments import (
    check_features,
    check_integers,
    check_same_rows,
    check_two,
)


class MaxSimLoss(InfoNCELoss):
    """Each query's tokens against its own document's, with all other documents as negatives.

    The score of a query and a document is the sum over the query's tokens of the largest product
    with a token of the document, of equal ones the first: ColBERT (Khattab and Zaharia 2020,
    arXiv 2004.12832), ColPali (Faysse et al. 2024, arXiv 2407.01449). Neither scores of all pairs
    nor products of tokens are stored, and each process keeps its own documents.

    Args:
        temperature: see `TemperatureLoss`. PyLate takes 1, ColPali 0.02.
        directions: "query_to_document", or "both": the mean with the cross-entropy of each
            document against all queries.
        score: "sum" over a query's tokens, or "mean": divided by their number.
        margin, margin_strategy, share_negatives, hardness_mode, hardness_strength: as for
            `InfoNCELoss`, of scores instead of similarities.
        label_smoothing: as for `InfoNCELoss`. It takes a second sweep over all pairs.
        normalize: scale each token's features to unit length first.
        group: see `ContrastiveLoss`.

    Raises:
        ValueError: a margin, or weighted negatives of the batch, with both directions: a score has
            no meaning with both sides exchanged.
    """

    def __init__(
        self,
        temperature: float | Tensor,
        *,
        directions: Literal["query_to_document", "both"] = "query_to_document",
        score: Literal["sum", "mean"] = "sum",
        margin: float | None = None,
        margin_strategy: Literal["absolute", "relative"] = "absolute",
        share_negatives: bool = False,
        hardness_mode: HardnessMode | None = None,
        hardness_strength: float = 0.0,
        label_smoothing: float = 0.0,
        normalize: bool = False,
        group: object = None,
    ) -> None:
        check_choice("directions", directions, ("query_to_document", "both"))
        super().__init__(
            temperature,
            margin=margin,
            margin_strategy=margin_strategy,
            reverse="separate" if directions == "both" else None,
            share_negatives=share_negatives,
            hardness_mode=hardness_mode,
            hardness_strength=hardness_strength,
            label_smoothing=label_smoothing,
            normalize=normalize,
            group=group,
        )
        self.directions, self.score = directions, check_choice("score", score, ("sum", "mean"))
        in_batch = hardness_mode in ("in_batch_negatives", "all_negatives")
        for name, given in (("margin", margin is not None), ("hardness_mode", in_batch)):
            if given and directions == "both":
                raise ValueError(
                    f"directions: expected 'query_to_document' with {name}={getattr(self, name)!r},"
                    " got 'both'"
                )

    def forward(  # type: ignore[override]
        self,
        queries: Tensor | tuple[Tensor, Tensor],
        documents: Tensor | tuple[Tensor, Tensor],
        query_mask: Tensor | None = None,
        document_mask: Tensor | None = None,
        negatives: Tensor | None = None,
        negative_mask: Tensor | None = None,
        *,
        query_cu_seqlens: Tensor | None = None,
        document_cu_seqlens: Tensor | None = None,
        ids: Tensor | None = None,
        weights: Tensor | None = None,
        temperature: float | Tensor | None = None,
    ) -> Tensor:
        """The mean loss over queries.

        The numbers of tokens may differ between processes. See `ContrastiveLoss` for errors.

        Args:
            queries: (b, l, d), or a tuple of this and `query_mask`. documents: (b, k, d), likewise.
                Instead, both sides or one may be packed: (tokens, d), with the places where each
                begins, and the end, in `cu_seqlens`.
            query_mask, document_mask: (b, l) and (b, k), true or 1 for tokens that count; None: all
                do. A query without any scores 0; a document without any is no negative, and its own
                query's loss is infinite.
            negatives: (n, k', d), documents that are negatives of every query of all processes; or
                (b, n, k', d), n for each query alone.
            negative_mask: (n, k') or (b, n, k').
            query_cu_seqlens, document_cu_seqlens: (b + 1,) integers, as FlashAttention takes them.
                They are read, which on a GPU waits for it.
            ids, weights: as for `ClipLoss`; pairs of equal ids (the same document) are left out of
                each other's negatives.
            temperature: for this call, instead of the constructor's.
        """
        x, query_mask = _padded("queries", "query", queries, query_mask, query_cu_seqlens)
        y, document_mask = _padded(
            "documents", "document", documents, document_mask, document_cu_seqlens
        )
        names = ("queries", "documents")
        check_two(x, y, names, tokens=True)
        check_same_rows(x, y, names)
        self._check_candidates(x, negatives, ids, "queries", "(b, n, k, d)")
        shared = negatives is not None and (negatives.dim() == 3 or self.share_negatives)
        weights = check_weights(weights, x)
        columns, masks = [y], [document_mask]
        if negatives is not None and shared:  # columns of the same matrix
            columns.append(negatives)
            masks.append(negative_mask)
        longest, length, counted = self._agreed(x, columns, masks)
        query = self._queries(x, query_mask, longest)
        positive = _counted(self._documents("document_mask", y, document_mask), counted)
        positive = _lengthened(positive, length)
        others = None
        if negatives is not None:
            others = self._documents("negative_mask", negatives, negative_mask)
            others = _lengthened(_counted(others, counted), length) if shared else others
        losses = self._losses(
            query,
            positive,
            others,
            None,
            self._scale(temperature, x),
            check_ids(ids, x, self.group),
        )
        return global_mean(losses, self.group, weights, name="queries")

    def _agreed(
        self, queries: Tensor, columns: list[Tensor], masks: list[Tensor | None]
    ) -> tuple[int, int, bool]:
        """Tokens of the longest query and document of all processes; whether some may be shorter.

        In a traced program they must be the same on all processes.
        """
        lengths, longest = [documents.shape[-2] for documents in columns], queries.shape[1]
        length, shortest = max(lengths), min(lengths)
        masked = any(mask is not None for mask in masks)
        if not torch.compiler.is_compiling():
            numbers = longest, length, -shortest, int(masked)
            found = largest_over_ranks("MaxSimLoss", numbers, queries.device, self.group)
            longest, length, shortest, masked = found[0], found[1], -found[2], bool(found[3])
        return longest, length, masked or length != shortest

    def _queries(self, features: Tensor, mask: Tensor | None, length: int) -> Rows:
        """Features with zeros where no token counts, and factors of the scores."""
        if mask is not None:
            mask = _checked_mask("query_mask", mask, features)
            features = features.masked_fill(~mask[..., None], 0)
        weight = None
        if self.score == "mean":
            counts = features.new_ones(features.shape[:2]) if mask is None else mask
            weight = counts.sum(1, dtype=torch.float64).clamp(min=1).reciprocal()
        return _lengthened(Rows(self._operand(features), None, weight), length)

    def _documents(self, name: str, features: Tensor, mask: Tensor | None) -> Rows:
        """Features with the tokens that count first, and their numbers."""
        lengths = None
        if mask is not None:
            mask = _checked_mask(name, mask, features)
            features = features.masked_fill(~mask[..., None], 0)
            order = mask.logical_not().to(torch.uint8).argsort(dim=-1, stable=True)
            features = features.gather(-2, order[..., None].expand(features.shape))
            lengths = mask.sum(-1)
        return Rows(self._operand(features), None, None, lengths)

    def _mean_logit(
        self, scale: Tensor, query: Rows, candidates: Rows, hard: Rows | None, queue: Rows | None
    ) -> Tensor:
        # It is no product of sums: a sweep in which all pairs are positives.
        documents = candidates.features
        col_ids = torch.zeros(len(documents), dtype=torch.int64, device=documents.device)
        if candidates.lengths is not None:
            col_ids = col_ids - (candidates.lengths == 0).to(torch.int64)  # no candidates
        ids = col_ids.new_zeros(len(query.features)), col_ids
        every, _ = Logits(scale, None, self.group).split(query, candidates, ids=ids)
        total, count = every.positive_sum, every.positive_count
        if hard is not None:
            logits = similarities(query, hard) * scale
            total = total + torch.where(logits > -torch.inf, logits, 0).sum(1)
            count = count + (logits > -torch.inf).sum(1)
        return total / count


def _padded(
    names: str, name: str, features: Any, mask: Tensor | None, cu_seqlens: Tensor | None
) -> tuple[Any, Tensor | None]:
    """Features (b, l, d) and their mask, of packed ones (tokens, d) or of a tuple."""
    if isinstance(features, tuple) and len(features) == 2:
        if mask is not None:
            raise ValueError(f"{name}_mask: expected None with a tuple of {names} and mask")
        features, mask = features
    if cu_seqlens is None:
        return features, mask
    if mask is not None:
        raise ValueError(f"{name}_mask: expected None with {name}_cu_seqlens, got a mask")
    check_features(names, features)
    size = cu_seqlens.shape[0] if isinstance(cu_seqlens, Tensor) else 0
    starts = check_integers(f"{name}_cu_seqlens", cu_seqlens, size, features)
    bounds = starts.tolist()
    if size == 0 or bounds[0] != 0 or bounds[-1] != len(features) or bounds != sorted(bounds):
        raise ValueError(
            f"{name}_cu_seqlens: expected numbers that rise from 0 to {len(features)}, got "
            f"{bounds[:4]} ... {bounds[-1:]}"
        )
    lengths = starts.diff()
    longest = max([1, *(end - start for start, end in itertools.pairwise(bounds))])
    row = torch.repeat_interleave(lengths, output_size=len(features))
    place = row * longest + torch.arange(len(features), device=row.device) - starts[row]
    padded = features.new_zeros((size - 1) * longest, features.shape[1])
    padded = padded.index_copy(0, place, features).unflatten(0, (size - 1, longest))
    return padded, torch.arange(longest, device=row.device) < lengths[:, None]


def _checked_mask(name: str, mask: Any, features: Tensor) -> Tensor:
    """A mask of one truth value for each token, as bool."""
    expected = tuple(features.shape[:-1])
    if not isinstance(mask, Tensor):
        raise TypeError(f"{name}: expected a tensor of shape {expected}, got {type(mask).__name__}")
    if tuple(mask.shape) != expected:
        raise ValueError(f"{name}: expected shape {expected}, got {tuple(mask.shape)}")
    if mask.device != features.device:
        raise ValueError(f"{name}: expected device {features.device}, got {mask.device}")
    return mask != 0


def _lengthened(rows: Rows, length: int) -> Rows:
    """Rows of at least `length` tokens, zeros at the end."""
    missing = length - rows.features.shape[-2]
    return rows._replace(features=F.pad(rows.features, (0, 0, 0, missing))) if missing > 0 else rows


def _counted(rows: Rows, counted: bool = True) -> Rows:
    """Rows with numbers of tokens, if these are asked for."""
    if not counted or rows.lengths is not None:
        return rows
    *shape, size, _ = rows.features.shape
    return rows._replace(lengths=torch.full(shape, size, device=rows.features.device))
