"""States of the same rows from several GPUs as one, and as results, in one launch each."""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from megabatch.similarity.backends.triton.cuts import cdiv
from megabatch.similarity.backends.triton.launch import kernel
from megabatch.similarity.backends.triton.tiles import LN2

#: Rows a program.
BLOCK = 256


def merged(states: Tensor) -> Tensor:
    """(k, rows of a state, size) -> (rows of a state, size); see `similarity.states`."""
    out = states.new_empty(states.shape[1:])
    _launch(states, out, False)
    return out


def results(states: Tensor, out: Tensor) -> None:
    """out = what `states.finish` makes of the states (k, ...) as one."""
    _launch(states, out, True)


def _launch(states: Tensor, out: Tensor, finish: bool) -> None:
    count, rows, size = states.shape
    if size:
        combine.launch(
            cdiv(size, BLOCK), states=states, part_stride=states.stride(0), stride=states.stride(1),
            result=out, result_stride=out.stride(0), count=count, size=size,
            KINDS=1 if rows == 2 else 2, FINISH=finish, B=BLOCK,
        )  # fmt: skip


@kernel
def combine(
    states, part_stride, stride, result, result_stride, count, size,
    KINDS: tl.constexpr, FINISH: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """result = `count` states as one, or what `states.finish` would make of that."""
    i = tl.program_id(0) * B + tl.arange(0, B)
    inside = i < size
    part_stride = part_stride.to(tl.int64)
    for kind in tl.static_range(KINDS):
        own = states + 2 * kind * stride + i
        top = tl.full((B,), float("-inf"), tl.float32)
        for part in range(count):
            one = tl.load(own + part * part_stride, mask=inside, other=float("-inf"))
            top = tl.maximum(top, one)
        # A state without any pair has -inf; -inf - -inf would be NaN.
        shift = tl.where(top == float("-inf"), 0.0, top)
        total = tl.zeros((B,), tl.float32)
        for part in range(count):
            one = tl.load(own + part * part_stride, mask=inside, other=float("-inf"))
            of_one = tl.load(own + part * part_stride + stride, mask=inside, other=0.0)
            total += of_one * tl.exp2(one - shift)
        if FINISH:
            tl.store(result + kind * result_stride + i, tl.log(total) + top * LN2, mask=inside)
        else:
            tl.store(result + 2 * kind * result_stride + i, top, mask=inside)
            tl.store(result + (2 * kind + 1) * result_stride + i, total, mask=inside)
    if KINDS == 2:
        for number in tl.static_range(2):
            total = tl.zeros((B,), tl.float32)
            for part in range(count):
                place = states + part * part_stride + (4 + number) * stride + i
                total += tl.load(place, mask=inside, other=0.0)
            row = 2 + number if FINISH else 4 + number
            tl.store(result + row * result_stride + i, total, mask=inside)
