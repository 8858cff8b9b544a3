"""Attention in blocks against float64, on a GPU or in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from megabatch.models.block_attention import block_attention
from tests.models.attention import (
    DTYPES,
    MARKS,
    check_output_and_gradient,
    check_values_of_any_strides,
    made,
)

pytestmark = MARKS


def attention(qkv: Tensor, causal: bool) -> Tensor:
    return block_attention(qkv, causal)[0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("length", "width"), [(64, 32), (65, 32), (100, 64), (128, 32), (197, 32)])
@pytest.mark.parametrize("own", [64, 128])
@pytest.mark.parametrize("causal", [False, True])
def test_output_and_gradient(
    length: int,
    width: int,
    dtype: torch.dtype,
    causal: bool,
    own: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("megabatch.models.block_attention.OWN", own)
    check_output_and_gradient(attention, length, width, dtype, causal)


@pytest.mark.parametrize("causal", [False, True])
def test_the_operator_for_tracers(causal: bool) -> None:
    qkv, _ = made(70, 32, torch.float32)
    torch.library.opcheck(block_attention.custom, (qkv, causal))


def test_values_of_any_strides() -> None:
    check_values_of_any_strides(attention, 70)
