"""Reductions over a similarity matrix that is never formed.

`S[i, j] = scale * <x_i, y_j>` for x (m, d) and y (n, d). Contrastive losses are a few lines of
ordinary PyTorch over these.
"""

from megabatch.similarity import (  # noqa: F401  (operators)
    sigmoid_ring,
    statistics_local,
    statistics_ring,
)
from megabatch.similarity.distributed.watchdog import set_abort_on_lost_rank
from megabatch.similarity.functions import Split, logsumexp, split_logsumexp
from megabatch.similarity.pointwise import paired
from megabatch.similarity.ranking import ranks, topk
from megabatch.similarity.sigmoid import softplus_sum
from megabatch.similarity.sweep import set_workspace

__all__ = [
    "Split",
    "logsumexp",
    "paired",
    "ranks",
    "set_abort_on_lost_rank",
    "set_workspace",
    "softplus_sum",
    "split_logsumexp",
    "topk",
]
