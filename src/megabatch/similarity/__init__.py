"""Reductions over a similarity matrix that is never formed.

The matrix is `S[i, j] = scale * <x_i, y_j>` for x (m, d) and y (n, d). With these reductions, a
contrastive loss takes a few lines of ordinary PyTorch.
"""

from megabatch.similarity.distributed.means import (
    global_mean,
    mean_row,
    pair_ids,
    replicated,
    share_of_mean,
    sum_over_ranks,
)
from megabatch.similarity.distributed.watchdog import set_abort_on_lost_rank
from megabatch.similarity.functions import (
    SoftTargets,
    Split,
    logsumexp,
    soft_targets,
    softplus_sum,
    split_logsumexp,
)
from megabatch.similarity.pointwise import paired
from megabatch.similarity.ranking import ranks, topk
from megabatch.similarity.settings import (
    set_chunk,
    set_gather,
    set_grid,
    set_overlap,
    set_workspace,
)

__all__ = [
    "SoftTargets",
    "Split",
    "global_mean",
    "logsumexp",
    "mean_row",
    "pair_ids",
    "paired",
    "ranks",
    "replicated",
    "set_abort_on_lost_rank",
    "set_chunk",
    "set_gather",
    "set_grid",
    "set_overlap",
    "set_workspace",
    "share_of_mean",
    "soft_targets",
    "softplus_sum",
    "split_logsumexp",
    "sum_over_ranks",
    "topk",
]
