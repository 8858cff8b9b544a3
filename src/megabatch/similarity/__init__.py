"""Reductions over a similarity matrix that is never formed.

The matrix is `S[i, j] = scale * <x_i, y_j>` for x (m, d) and y (n, d). With these reductions, a
contrastive loss takes a few lines of ordinary PyTorch.
"""

from megabatch.similarity.distributed.means import (
    global_mean,
    largest_over_ranks,
    log_mean_exp,
    mean_row,
    pair_ids,
    replicated,
    share_of_mean,
    sum_over_ranks,
)
from megabatch.similarity.pointwise import paired
from megabatch.similarity.ranking import ranks, topk
from megabatch.similarity.settings import (
    set_gather,
    set_grid,
    set_workspace,
)
from megabatch.similarity.sigmoid import softplus_sum
from megabatch.similarity.soft_targets import SoftTargets, soft_target_stacks, soft_targets
from megabatch.similarity.softmax import Split, Stacks, logsumexp, split_logsumexp, split_stacks

__all__ = [
    "SoftTargets",
    "Split",
    "Stacks",
    "global_mean",
    "largest_over_ranks",
    "log_mean_exp",
    "logsumexp",
    "mean_row",
    "pair_ids",
    "paired",
    "ranks",
    "replicated",
    "set_gather",
    "set_grid",
    "set_workspace",
    "share_of_mean",
    "soft_target_stacks",
    "soft_targets",
    "softplus_sum",
    "split_logsumexp",
    "split_stacks",
    "sum_over_ranks",
    "topk",
]
