"""PyLate's contrastive loss, with its names and arguments, without the scores of all pairs.

    from megabatch.integrations.pylate import CachedContrastive  # in place of pylate.losses

PyLate itself is not imported: the model is any module with the attributes `skiplist` and
`do_query_expansion` whose output has "token_embeddings", or DistributedDataParallel around one.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megabatch.gradient_cache import GradientCache
from megabatch.losses.base import unit_rows
from megabatch.losses.maxsim import MaxSimLoss
from megabatch.similarity import sum_over_ranks

Tokens = tuple[Tensor, Tensor]  #: features (b, tokens, d) and a mask


class CachedContrastive(nn.Module):
    """Queries against their positives and all other documents, with gradient caching.

    See `pylate.losses.CachedContrastive`. The gradients are those of the loss returned, as those of
    `pylate.losses.Contrastive` are; PyLate's cached ones are those of the sum over queries.

    Args:
        model: see the module.
        score_metric: None or PyLate's `ColBERTScores`; others raise a ValueError.
        mini_batch_size: texts that the model encodes at a time.
        score_mini_batch_size, show_progress_bar: have no effect. Scores need little memory.
        size_average: the mean over queries, not their sum.
        gather_across_devices: take negatives from all processes; documents stay where they are. As
            in PyLate, the loss is then multiplied by the number of processes.
        temperature: see `MaxSimLoss`.
    """

    def __init__(
        self,
        model: nn.Module,
        score_metric: Any = None,
        mini_batch_size: int = 32,
        score_mini_batch_size: int | None = None,
        size_average: bool = True,
        gather_across_devices: bool = False,
        show_progress_bar: bool = False,
        temperature: float = 1.0,
    ) -> None:
        super().__init__()
        name = type(score_metric).__name__
        if name not in ("NoneType", "ColBERTScores"):
            raise ValueError(f"score_metric: expected None or PyLate's ColBERTScores, got {name}")
        self.model, self.mini_batch_size, self.size_average = model, mini_batch_size, size_average
        self._step: tuple[Any, GradientCache] | None = None
        self.loss = MaxSimLoss(temperature, group=None if gather_across_devices else "local")

    def forward(self, sentence_features: Iterable[dict[str, Tensor]], labels: Any = None) -> Tensor:
        """The loss of tokenized queries, positives and any columns of negatives.

        Args:
            sentence_features: of each column, "input_ids" and "attention_mask" (b, tokens), with as
                many tokens in all columns of negatives. labels: not used.
        """
        columns = list(sentence_features)
        key = self.model, self.mini_batch_size, len(columns)  # trainers wrap the model
        if self._step is None or self._step[0] != key:
            encoders = [partial(_tokens, self.model, i == 0) for i in range(len(columns))]
            self._step = key, GradientCache(encoders, self._loss_of_tokens, self.mini_batch_size)
        return self._step[1](*columns)

    def _loss_of_tokens(self, queries: Tokens, positives: Tokens, *negatives: Tokens) -> Tensor:
        others = map(torch.cat, zip(*negatives, strict=True))
        mean = self.loss(queries, positives, None, None, *others)
        count = torch.full_like(mean, 1 if self.size_average else len(queries[0]))
        return mean * sum_over_ranks(count, self.loss.group)


def _tokens(model: Any, is_query: bool, features: dict[str, Tensor]) -> Tokens:
    """Tokens of unit length; those of documents that do not count score 0, as in PyLate."""
    inner = model if hasattr(model, "skiplist") else model.module  # DistributedDataParallel
    ids, mask = features["input_ids"], features["attention_mask"] != 0
    tokens = model(dict(features))["token_embeddings"]
    tokens = unit_rows(tokens, tokens.dtype)
    if is_query:
        return tokens, mask | inner.do_query_expansion
    counted = mask & ~torch.isin(ids, ids.new_tensor(inner.skiplist))
    first_zero = counted.logical_not().cumsum(1) == 1  # one zero vector has the effect of all
    return tokens.masked_fill(~counted[..., None], 0), counted | first_zero
