"""The kernel that merges states of the same rows, against `states`."""

from __future__ import annotations

import math

import pytest
import torch

from megabatch.similarity import states

pytest.importorskip("triton")
from megabatch.similarity.triton import softmax_forward

# The logarithm of an empty sum is -inf by design; the interpreter's NumPy warns of it.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("sums", [1, 2])
@pytest.mark.parametrize(("count", "size"), [(1, 1), (2, 300), (5, 257), (3, 0)])
def test_merged_states(sums: int, count: int, size: int) -> None:
    numbers = 2 if sums == 1 else 6
    generator = torch.Generator().manual_seed(count)
    found = torch.randn(count, numbers, size + 3, generator=generator) * 40
    found[:, 1 : 2 * sums : 2].abs_()
    empty = torch.rand(count, size + 3, generator=generator) < 0.3
    empty[:, : size // 4] = True  # no state has a pair
    for k in range(sums):
        found[:, 2 * k].masked_fill_(empty, -math.inf)
        found[:, 2 * k + 1].masked_fill_(empty, 0)
    given = found.to(DEVICE)[..., :size]  # not contiguous

    def results(state: torch.Tensor) -> torch.Tensor:
        return states.to_logsumexp(state, state.new_empty(1 if sums == 1 else 4, size))

    def in_base_e(state: torch.Tensor) -> torch.Tensor:
        state = state.double()
        state[..., 0 : 2 * sums : 2, :] *= math.log(2)
        return state

    theirs = results(states.merge(in_base_e(given)))
    out = torch.full((2 * numbers, size), math.nan, device=DEVICE)[:numbers]
    softmax_forward.merge(given, out, to_logsumexp=False)
    torch.testing.assert_close(results(in_base_e(out)), theirs, rtol=1e-5, atol=1e-5)
    out = torch.full((2 * numbers, size), math.nan, device=DEVICE)[: len(theirs)]
    softmax_forward.merge(given, out, to_logsumexp=True)
    torch.testing.assert_close(out.double(), theirs, rtol=1e-5, atol=1e-5)
