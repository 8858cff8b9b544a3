"""What a side of the matrix needs from block to block: states forward, pulls backward.

A *state* holds one side's running statistics, one row or column of the matrix a column:
`[largest negative, sum of e^(negative - largest), the same two over positives, sum of positive
logits, number of positives]`; the last four are absent where no pair can be positive. A *pull*
holds what the backward pass needs of a side: `[log-sum-exp over negatives, its upstream gradient,
the same two over positives, upstream gradient of the sum of positive logits]`.

Sums are kept as (largest, shifted sum) and not as a log-sum-exp, so that merging many blocks
rounds only the sum.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megabatch.similarity.arguments import accumulator_dtype
from megabatch.similarity.pairs import PAIRED


def kinds_of(diagonal: str, row_ids: Tensor | None) -> int:
    """1 where all pairs are negatives, 2 where some may be positive."""
    return 2 if row_ids is not None or diagonal == PAIRED else 1


def empty_state(size: int, kinds: int, like: Tensor) -> Tensor:
    """The state of `size` rows before any column was seen; kinds: 1 (negatives) or 2."""
    dtype = accumulator_dtype(like.dtype)
    state = torch.zeros(2 if kinds == 1 else 6, size, dtype=dtype, device=like.device)
    state[0 : 2 * kinds : 2] = -math.inf
    return state


def finish(state: Tensor, unit: float) -> Tensor:
    """(reference, sum relative to it) -> log-sum-exp."""
    kinds = 1 if state.shape[0] == 2 else 2
    out = state.new_empty(1 if kinds == 1 else 4, state.shape[1])
    # Few launches: on a GPU a small batch's time is theirs.
    references, sums = state[0 : 2 * kinds : 2], state[1 : 2 * kinds : 2]
    torch.add(sums.log(), references, alpha=unit, out=out[:kinds])
    if kinds == 2:
        out[2:] = state[4:]
    return out


def pull_of(values: Tensor, gradient: Tensor | None) -> Tensor | None:
    """What the backward tiles need of one side: see `tile_torch`."""
    if gradient is None:
        return None
    kinds = 1 if values.shape[0] == 1 else 2
    pull = values.new_empty(2 if kinds == 1 else 5, values.shape[1])
    # A side without any pair is -inf; a reference of +inf makes its exponentials 0, not NaN.
    empty = values[:kinds] == -math.inf
    pull[0 : 2 * kinds : 2] = values[:kinds].masked_fill(empty, math.inf)
    pull[1 : 2 * kinds : 2] = gradient[:kinds].masked_fill(empty, 0)
    if kinds == 2:
        pull[4] = gradient[2]
    return pull
