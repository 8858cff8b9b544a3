"""States of the same rows as one, in one launch, against `states`."""

from __future__ import annotations

import math

import pytest
import torch

from megabatch.similarity import states

pytest.importorskip("triton")
from megabatch.similarity.backends.triton import softmax_forward

# The logarithm of an empty sum is meant; the interpreter's NumPy remarks on it.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
UNIT = math.log(2)


@pytest.mark.parametrize("kinds", [1, 2])
@pytest.mark.parametrize(("count", "size"), [(1, 1), (2, 300), (5, 257), (3, 0)])
def test_merged_states(kinds: int, count: int, size: int) -> None:
    rows = 2 if kinds == 1 else 6
    generator = torch.Generator().manual_seed(count)
    found = torch.randn(count, rows, size + 3, generator=generator) * 40
    found[:, 1 : 2 * kinds : 2].abs_()
    empty = torch.rand(count, size + 3, generator=generator) < 0.3
    empty[:, : size // 4] = True  # no state has a pair
    for kind in range(kinds):
        found[:, 2 * kind].masked_fill_(empty, -math.inf)
        found[:, 2 * kind + 1].masked_fill_(empty, 0)
    given = found.to(DEVICE)[..., :size]  # not contiguous
    wanted = states.merge(given.double(), UNIT)
    mine = softmax_forward.merged(given)
    ours, theirs = states.finish(mine.double(), UNIT), states.finish(wanted, UNIT)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    out = torch.full((2 * rows, size), math.nan, device=DEVICE)[: len(theirs)]
    softmax_forward.merged_logsumexp(given, out)
    torch.testing.assert_close(out.double(), theirs, rtol=1e-5, atol=1e-5)
