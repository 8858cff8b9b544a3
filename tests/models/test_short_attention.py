"""The kernels of short sequences against float64, on a GPU or in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from megabatch.models.short_attention import short_attention
from tests.models.attention import (
    DTYPES,
    MARKS,
    check_output_and_gradient,
    check_values_of_any_strides,
    made,
)
from tests.similarity.triton import DEVICE

pytestmark = MARKS


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("length", "width"), [(1, 32), (9, 64), (16, 32), (33, 64), (64, 32)])
@pytest.mark.parametrize("causal", [False, True])
def test_output_and_gradient(length: int, width: int, dtype: torch.dtype, causal: bool) -> None:
    check_output_and_gradient(short_attention, length, width, dtype, causal)


@pytest.mark.parametrize("options", [(), (True, 0.0), (True, 0.25), (False, 0.25)])
@pytest.mark.parametrize("causal", [False, True])
def test_the_operator_for_tracers(causal: bool, options: tuple[bool, float] | tuple[()]) -> None:
    qkv, _ = made(5, 32, torch.float32)
    given: list[object] = []
    if options:
        masked, dropout = options
        given = [padding(5) if masked else None, dropout, seed_of(1) if dropout else None]
    torch.library.opcheck(short_attention.custom, (qkv, causal, *given))


def test_values_of_any_strides() -> None:
    check_values_of_any_strides(short_attention, 5)


def padding(length: int) -> Tensor:
    """The mask of three sequences: one is padded on the right, one on the left, one is empty."""
    places = torch.arange(length, device=DEVICE)
    return torch.stack([places <= length // 2, places >= length // 2, places < 0])


def seed_of(number: int) -> Tensor:
    return torch.tensor([number], device=DEVICE)


def dense(qkv: Tensor, causal: bool, seen: Tensor, factor: Tensor | float = 1.0) -> Tensor:
    """The same attention by torch's operations, with what dropout multiplies (n, heads, q, k)."""
    q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))
    shown = seen[:, None, None, :].expand(-1, 1, qkv.shape[1], -1)
    shown = shown.tril() if causal else shown
    p = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~shown, -torch.inf).softmax(-1)
    return (p.nan_to_num(0) * factor @ v).transpose(1, 2)


def check(found: tuple[Tensor, ...], exact: tuple[Tensor, ...], plain: tuple[Tensor, ...]) -> None:
    """An output and a gradient: errors are no larger than those of torch's operations."""
    for one, truth, other in zip(found, exact, plain, strict=True):
        error, limit = ((t.double() - truth).norm() for t in (one, other))
        assert error <= max(limit, 1e-6 * truth.norm())


def both(out: Tensor, qkv: Tensor, upstream: Tensor) -> tuple[Tensor, Tensor]:
    return out, torch.autograd.grad(out, qkv, upstream.to(out.dtype))[0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("length", "width"), [(1, 32), (9, 64), (33, 32), (64, 64)])
@pytest.mark.parametrize("causal", [False, True])
def test_tokens_that_none_sees(length: int, width: int, dtype: torch.dtype, causal: bool) -> None:
    qkv, upstream = made(length, width, dtype)
    seen, wide = padding(length), qkv.detach().double().requires_grad_()
    found = both(short_attention(qkv, causal, seen), qkv, upstream)
    exact = both(dense(wide, causal, seen), wide, upstream)
    check(found, exact, both(dense(qkv, causal, seen), qkv, upstream))
    assert not found[0][2].any()
    assert not found[1][2].any()
    assert not found[1][0, length // 2 + 1 :, 1:].any()  # keys and values


def kept(length: int, dropout: float, seed: Tensor) -> Tensor:
    """The mask of dropout, bool (3, 2, length, length), from one-hot values of equal weights."""
    qkv = torch.zeros(3, length, 3, 2, 64, device=DEVICE, dtype=torch.float16)
    qkv[:, :, 2] = torch.eye(length, 64, device=DEVICE)[:, None]
    out = short_attention(qkv, False, None, dropout, seed)[..., :length]
    values = out.unique()
    assert values.tolist() == pytest.approx([0, 1 / length / (1 - dropout)], rel=1e-3)
    return out.transpose(1, 2) != 0


@pytest.mark.parametrize("causal", [False, True])
def test_dropout(causal: bool) -> None:
    length, seed, dtype = 33, seed_of(2**40 + 1), DTYPES[0]
    qkv, upstream = made(length, 64, dtype)
    factor = kept(length, 0.25, seed) / 0.75
    seen, wide = padding(length), qkv.detach().double().requires_grad_()
    found = both(short_attention(qkv, causal, seen, 0.25, seed), qkv, upstream)
    exact = both(dense(wide, causal, seen, factor.double()), wide, upstream)
    check(found, exact, both(dense(qkv, causal, seen, factor.to(dtype)), qkv, upstream))
    again = both(short_attention(qkv, causal, seen, 0.25, seed), qkv, upstream)
    assert all(map(torch.equal, found, again))


def test_what_dropout_keeps() -> None:
    mask = kept(64, 0.25, seed_of(1))
    share = mask.double().mean((-2, -1))
    torch.testing.assert_close(share, torch.full_like(share, 0.75), rtol=0, atol=0.03)
    others = [*mask.flatten(0, 1), *kept(64, 0.25, seed_of(2**32 + 1)).flatten(0, 1)]
    for i, one in enumerate(others):  # another mask for each head, sequence and seed
        for other in others[:i]:
            assert 0.55 < (one == other).double().mean() < 0.7  # 0.75**2 + 0.25**2 by chance
