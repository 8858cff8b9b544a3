"""Running states of log-sum-exps, and the numbers that their gradients need.

A *state* holds the statistics of one row (or column) in each of its columns: `[largest negative,
sum of e^(negative - largest), the same two over positives, sum of positive logits, number of
positives]`; the last four are absent if no pair can be positive. Sums are kept as (largest, shifted
sum) and not as a log-sum-exp, so that merging many blocks rounds only the sum.

*Results* are `[log-sum-exp over negatives, that over positives, sum of positive logits, number of
positives]`, or the first alone.

A packed *upstream* holds the numbers of a side that dS depends on: `[log-sum-exp over negatives,
its upstream gradient, the same two over positives, upstream gradient of the sum of positive
logits]`, or the first two. `soft_targets` says what the numbers of its states are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megabatch.similarity.arguments import accumulator_dtype

#: float16 holds dS from 2^-24 to 2^16: the largest upstream gradient is scaled to this. At most six
#: of them add up in one dS, and a probability of 1 / 4M is still a normal number.
LARGEST_UPSTREAM = 4096.0


class Numbers(NamedTuple):
    """How many numbers a reduction keeps of a row."""

    state: int
    results: int
    references: tuple[slice, ...]  #: places of the largest logits in a state
    differences: tuple[slice, ...] = ()  #: places of sums of differences of logits


#: Of log-sum-exps, without positives and with them, and of soft targets.
NEGATIVES = Numbers(2, 1, (slice(0, 1),))
SPLIT = Numbers(6, 4, (slice(0, 4, 2),))
TARGETS = Numbers(10, 7, (slice(0, 4, 2), slice(6, 10, 3)), (slice(8, 9),))


def empty(numbers: int, size: int, like: Tensor) -> Tensor:
    """(numbers, size) for the statistics of `size` rows of features like `like`, uninitialised."""
    return like.new_empty(numbers, size, dtype=accumulator_dtype(like.dtype))


def merge(states: Tensor) -> Tensor:
    """Several states (k, numbers, size) of the same rows as one."""
    if states.shape[1] == TARGETS.state:
        return _merge_targets(states)
    end = _sums_end(states[0])
    out = states.new_empty(states.shape[1:])
    references, sums = states[:, 0:end:2], states[:, 1:end:2]
    top = torch.amax(references, 0)
    # A state without any pair has -inf; -inf - -inf would be NaN.
    weights = (references - top.clamp(min=torch.finfo(top.dtype).min)).exp_()
    out[0:end:2] = top
    torch.sum(weights.mul_(sums), 0, out=out[1:end:2])
    if end == 4:
        torch.sum(states[:, 4:], 0, out=out[4:])
    return out


def write_results(state: Tensor, out: Tensor) -> None:
    """Write the results of a state to `out`."""
    if len(state) == TARGETS.state:
        _write_target_results(state, out)
        return
    end = _sums_end(state)
    # Few launches: on a GPU they decide a small batch's time.
    torch.add(state[1:end:2].log(), state[0:end:2], out=out[: end // 2])
    if end == 4:
        out[2:] = state[4:]


def upstream(results: Tensor, gradient: Tensor) -> Tensor:
    """The upstream of a side from its results and their gradients."""
    if len(results) == TARGETS.results:
        return _target_upstream(results, gradient)
    sums = len(results) // 2 or 1
    out = results.new_empty(5 if sums == 2 else 2, results.shape[1])
    # A side without any pair is -inf; a reference of +inf makes its exponentials 0, not NaN.
    empty = results[:sums] == -math.inf
    out[0 : 2 * sums : 2] = results[:sums].masked_fill(empty, math.inf)
    out[1 : 2 * sums : 2] = gradient[:sums].masked_fill(empty, 0)
    if sums == 2:
        out[4] = gradient[2]
    return out


def upstream_divisor(sides: Sequence[Tensor]) -> Tensor | None:
    """() divisor with which the upstream gradients fit float16's dS; None: there are no rows."""
    gradients = [t for packed in sides for t in (packed[1::2], packed[4:]) if t.numel()]
    largest = [gradient.abs().amax() for gradient in gradients]
    return torch.stack(largest).amax() / LARGEST_UPSTREAM if largest else None


def _sums_end(state: Tensor) -> int:
    """Where the (largest, sum) pairs of a state end."""
    return 2 if len(state) == 2 else 4


def divide_upstream(packed: Tensor, divisor: Tensor) -> None:
    """Divide the upstream gradients in a packed upstream, in place."""
    packed[1::2] /= divisor
    packed[4:] /= divisor


# --- soft targets ---------------------------------------------------------------------------------


def student_largest(state: Tensor) -> Tensor:
    """The student's largest logit of each row so far."""
    return torch.maximum(state[0], state[2])


def finite(values: Tensor) -> Tensor:
    """The values with 0 instead of -inf, the reference of a row without any pair."""
    return values.masked_fill(values == -math.inf, 0)


def _merge_targets(parts: Tensor) -> Tensor:
    out = parts.new_empty(parts.shape[1:])
    out[:6] = merge(parts[:, :6])
    out[6:8] = merge(parts[:, 6:8])
    torch.amax(parts[:, 9], 0, out=out[9])  # only one state has the pair (i, i)
    tops = torch.maximum(parts[:, 0], parts[:, 2])
    # A state without any pair has sums of 0 and references of -inf.
    below = torch.where(tops == -math.inf, 0, student_largest(out) - tops)
    weights = (finite(parts[:, 6]) - finite(out[6])).clamp_(max=0).exp_()
    torch.sum(weights * (parts[:, 8] + below * parts[:, 7]), 0, out=out[8])
    return out


def _write_target_results(state: Tensor, out: Tensor) -> None:
    write_results(state[:6], out[:4])
    top = finite(student_largest(state))
    # log of the sum relative to the largest logit: no difference of two large numbers.
    sums = state[1] * (state[0] - top).exp() + state[3] * (state[2] - top).exp()
    largest = finite(torch.maximum(state[6], state[9]))
    others, own = ((state[k] - largest).exp() for k in (6, 9))
    total = others * state[7] + own
    below = others * state[8] + own * torch.where(own == 0, 0, top - state[2])
    empty = (total == 0) & (sums == 0)
    mean = below / total.masked_fill(empty, 1)
    out[4] = (sums.log() + mean).masked_fill(empty, 0)
    torch.add(state[7].log(), state[6], out=out[5])
    out[6] = state[9]


def _target_upstream(results: Tensor, gradient: Tensor) -> Tensor:
    """The gradient of a pair (i, i) is a number of its row and its column alone.

    Of the cross-entropy it is P - T, here as (1 - T) - (1 - P): what is left of two probabilities
    near 1 would otherwise be their rounding.
    """
    negative, positive, _, _, _, teacher_negative, teacher_positive = results
    g_negative, g_positive, g_sum, _, g_targets = gradient[:5]
    out = results.new_empty(5, results.shape[1])
    empty = negative == -math.inf
    share = (negative - torch.logaddexp(negative, positive)).exp()  # of the negatives: 1 - P
    share = share.masked_fill(empty, 0)
    teacher_share = torch.sigmoid(teacher_negative - teacher_positive)
    # A side without any such pair is -inf; a reference of +inf makes its exponentials 0, not NaN.
    out[0] = negative.masked_fill(empty, math.inf)
    out[1] = torch.addcmul(g_negative, g_targets, share).masked_fill_(empty, 0)
    out[2] = torch.logaddexp(teacher_negative, teacher_positive)
    out[3] = g_targets
    out[4] = g_positive + g_sum + g_targets * (teacher_share - share)
    return out
