"""One block of the similarity matrix in torch operations: any device, the readable truth.

States and pulls are those of `states`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from megabatch.similarity.arguments import accumulator_dtype
from megabatch.similarity.pairs import Pairs

#: Buffers of a block's size that live at once in the worst case (ids with a ceiling).
BUFFERS = 6


P = ParamSpec("P")
T = TypeVar("T")


def without_autocast(function: Callable[P, T]) -> Callable[P, T]:
    """Products in their operands' dtype: a caller's autocast stays on inside custom operators."""

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
        first = args[0]
        assert isinstance(first, Tensor)
        if not torch.is_autocast_enabled(first.device.type):  # entering costs 10 us
            return function(*args, **kwargs)
        with torch.autocast(first.device.type, enabled=False):
            return function(*args, **kwargs)

    return wrapped


@without_autocast
def logits(x: Tensor, y: Tensor, scale: Tensor, out: Tensor | None = None) -> Tensor:
    """scale * x @ y.T with products and sums as accurate as the dtype's accumulator.

    Raw logits are never rounded to half precision (at 16-32 a bf16 step is 0.125: probabilities
    off by 6%). The CPU has no half-precision product with a wider result, so it multiplies in
    float32, where products of halves are exact.
    """
    if x.dtype == accumulator_dtype(x.dtype):
        return torch.mm(x * scale, y.T, out=out)
    if x.device.type == "cuda":
        return torch.mm(x, y.T, out_dtype=torch.float32).mul_(scale)
    return torch.mm(x.float().mul_(scale), y.float().T, out=out)


@without_autocast
def forward(
    x: Tensor,
    y: Tensor,
    scale: Tensor,
    pairs: Pairs,
    rows: Tensor,
    columns: Tensor | None,
    buffers: tuple[Tensor, Tensor],
    kept: Tensor | None,
) -> None:
    """Merge the block x (m, d) against y (n, d) into the states `rows` and `columns`, in place.

    Its logits stay in `kept` for the backward pass, if that is given.
    """
    s = logits(x, y, scale, out=buffers[0] if kept is None else kept)
    positive, dropped = pairs.masks(s)
    if positive is None and dropped is None:
        shift = _merge_sum(rows[:2], s, 1, buffers[1])
        if columns is not None and not _merge_shared(columns[:2], buffers[1], shift):
            _merge_sum(columns[:2], s, 0, buffers[1])
        return
    excluded = _either(positive, dropped)
    negatives = s.masked_fill(excluded, -torch.inf)
    for state, dim in ((rows, 1), (columns, 0)):
        if state is None:
            continue
        _merge_sum(state[:2], negatives, dim, buffers[1])
        if positive is not None:
            _merge_sum(state[2:4], s.masked_fill(~positive, -torch.inf), dim, buffers[1])
            state[4] += s.masked_fill(~positive, 0).sum(dim)
            state[5] += positive.sum(dim)


@without_autocast
def backward(
    x: Tensor,
    y: Tensor,
    scale: Tensor,
    pairs: Pairs,
    rows: Tensor | None,
    columns: Tensor | None,
    dx: Tensor | None,
    dy: Tensor | None,
    buffers: tuple[Tensor, Tensor],
    kept: Tensor | None,
    fresh: tuple[bool, bool] = (False, False),
) -> None:
    """Add dS @ y to dx and dS.T @ x to dy (accumulator dtype, without the factor `scale`).

    `rows` and `columns` are pulls; dS combines both in the accumulator's dtype before it is
    rounded for the products. `kept`: the block's logits, if the forward pass left them.
    `fresh`: dx, dy hold nothing yet.
    """
    s = logits(x, y, scale, out=buffers[0]) if kept is None else kept
    positive, dropped = pairs.masks(s)
    if positive is None:
        ds = _pull(s, rows, columns, 0, buffers)
    else:
        ds = torch.where(
            positive,
            _pull(s, rows, columns, 2, (torch.empty_like(s), torch.empty_like(s))),
            _pull(s, rows, columns, 0, buffers),
        )
    if dropped is not None:
        ds = ds.masked_fill(dropped, 0)
    if dx is not None:
        add_product(dx, ds, y, fresh[0])
    if dy is not None:
        add_product(dy, ds.T, x, fresh[1])


def _merge_sum(state: Tensor, s: Tensor, dim: int, out: Tensor) -> Tensor:
    """Merge the exponentials of `s` along `dim` into (largest, shifted sum).

    Leaves e^(s - shift) in `out` and returns the shift.
    """
    largest = torch.maximum(state[0], s.amax(dim))
    # A row without any pair yet keeps -inf as its largest; shift by 0 there, not by -inf.
    shift = largest.masked_fill(largest == -torch.inf, 0)
    exponentials = torch.sub(s, shift.unsqueeze(dim), out=out).exp_()
    state[1].mul_((state[0] - shift).exp_()).add_(exponentials.sum(dim))
    state[0].copy_(largest)
    return shift


def _merge_shared(state: Tensor, exponentials: Tensor, shift: Tensor) -> bool:
    """Merge the columns' sums of the rows' e^(s - shift), if they are as good as their own.

    One exponential a logit instead of two. Weighting each row by e^(shift - reference) gives the
    columns' sums relative to one reference; terms that underflowed on the way are below the
    smallest normal number, so a sum above its power 2/3 has lost nothing that counts.
    """
    if exponentials.device.type != "cpu":  # the check would stall a GPU's stream
        return False
    reference = shift.max()
    sums = (shift - reference).exp_() @ exponentials
    if (sums < torch.finfo(sums.dtype).tiny ** (2 / 3)).any():
        return False
    largest = torch.maximum(state[0], reference)
    state[1].mul_((state[0] - largest).exp_()).add_(sums.mul_((reference - largest).exp_()))
    state[0].copy_(largest)
    return True


def _pull(
    s: Tensor,
    rows: Tensor | None,
    columns: Tensor | None,
    start: int,
    buffers: tuple[Tensor, Tensor],
) -> Tensor:
    """The upstream gradients of each logit in `s`, over negatives (start 0) or positives (2).

    The first buffer may be `s` itself, which is then destroyed.
    """
    scratch, out = buffers
    if rows is not None and columns is not None and start == 0 and _shareable(rows, columns):
        reference = rows[0].max()
        rows_factor = (reference - rows[0]).exp_().mul_(rows[1])
        columns_factor = (reference - columns[0]).exp_().mul_(columns[1])
        torch.add(rows_factor[:, None], columns_factor, out=out)
        return out.mul_(torch.sub(s, reference, out=scratch).exp_())
    if rows is not None:
        torch.sub(s, rows[start, :, None], out=out).exp_().mul_(rows[start + 1, :, None])
    else:
        out.zero_()
    if columns is not None:
        exponentials = torch.sub(s, columns[start], out=scratch).exp_()
        out.addcmul_(exponentials, columns[start + 1])
    if start == 2 and rows is not None:
        out += rows[4, :, None]
    if start == 2 and columns is not None:
        out += columns[4]
    return out


def _shareable(rows: Tensor, columns: Tensor) -> bool:
    """Whether one exponential serves both sides of a block: all their log-sum-exps lie close.

    Within 40 of each other, what underflows relative to the largest (e^-87 in float32) is a
    probability below e^-47.
    """
    if rows.device.type != "cpu":  # the check would stall a GPU's stream
        return False
    low, high = torch.aminmax(torch.cat([rows[0], columns[0]]))
    return bool(high - low < 40)


@without_autocast
def add_product(total: Tensor, left: Tensor, right: Tensor, fresh: bool = False) -> None:
    """total += left @ right in total's dtype; where total is `fresh` it holds nothing yet."""
    beta = 0 if fresh else 1
    if right.dtype != total.dtype and right.device.type == "cuda":
        half = left.to(right.dtype)
        torch.addmm(total, half, right, beta=beta, out_dtype=torch.float32, out=total)
    else:
        total.addmm_(left.to(total.dtype), right.to(total.dtype), beta=beta)


def _either(first: Tensor | None, second: Tensor | None) -> Tensor:
    if first is None or second is None:
        return second if first is None else first  # type: ignore[return-value]
    return first | second
