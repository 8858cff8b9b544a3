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
    return clear(new_state(size, kinds, like))


def new_state(size: int, kinds: int, like: Tensor) -> Tensor:
    """Where the state of `size` rows is to be written."""
    rows = 2 if kinds == 1 else 6
    return like.new_empty(rows, size, dtype=accumulator_dtype(like.dtype))


def clear(state: Tensor) -> Tensor:
    """Make it the state before any column was seen."""
    kinds = 1 if state.shape[0] == 2 else 2
    state.zero_()
    state[0 : 2 * kinds : 2] = -math.inf
    return state


def clear_fresh(rows: Tensor, columns: Tensor | None, fresh: tuple[bool, bool]) -> None:
    """Clear the state of the rows, of the columns, where it holds nothing yet."""
    for state, new in zip((rows, columns), fresh, strict=True):
        if new and state is not None:
            clear(state)


def new_results(state: Tensor) -> Tensor:
    """Where `finish` of a state like this one is to be written."""
    return state.new_empty(1 if state.shape[0] == 2 else 4, state.shape[1])


def merge(states: Tensor, unit: float) -> Tensor:
    """Several states (k, ...) of the same rows as one."""
    kinds = 1 if states.shape[1] == 2 else 2
    out = states.new_empty(states.shape[1:])
    references, sums = states[:, 0 : 2 * kinds : 2], states[:, 1 : 2 * kinds : 2]
    top = torch.amax(references, 0)
    # A state without any pair has -inf; -inf - -inf would be NaN.
    weights = (references - top.clamp(min=torch.finfo(top.dtype).min)).mul_(unit).exp_()
    out[0 : 2 * kinds : 2] = top
    torch.sum(weights.mul_(sums), 0, out=out[1 : 2 * kinds : 2])
    if kinds == 2:
        torch.sum(states[:, 4:], 0, out=out[4:])
    return out


def finish(state: Tensor, unit: float, out: Tensor | None = None) -> Tensor:
    """(reference, sum relative to it) -> log-sum-exp."""
    kinds = 1 if state.shape[0] == 2 else 2
    out = new_results(state) if out is None else out
    # Few launches: on a GPU a small batch's time is theirs.
    references, sums = state[0 : 2 * kinds : 2], state[1 : 2 * kinds : 2]
    torch.add(sums.log(), references, alpha=unit, out=out[:kinds])
    if kinds == 2:
        out[2:] = state[4:]
    return out


def pull_of(values: Tensor, gradient: Tensor) -> Tensor:
    """What the backward tiles need of one side: see `tile_torch`."""
    kinds = 1 if values.shape[0] == 1 else 2
    pull = values.new_empty(2 if kinds == 1 else 5, values.shape[1])
    # A side without any pair is -inf; a reference of +inf makes its exponentials 0, not NaN.
    empty = values[:kinds] == -math.inf
    pull[0 : 2 * kinds : 2] = values[:kinds].masked_fill(empty, math.inf)
    pull[1 : 2 * kinds : 2] = gradient[:kinds].masked_fill(empty, 0)
    if kinds == 2:
        pull[4] = gradient[2]
    return pull
