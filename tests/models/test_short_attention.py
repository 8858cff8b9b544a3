"""The kernels of short sequences against float64, on a GPU or in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
from megabatch.models.short_attention import short_attention
from tests.models.attention import (
    DTYPES,
    MARKS,
    check_output_and_gradient,
    check_values_of_any_strides,
    made,
)

pytestmark = MARKS


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("length", "width"), [(1, 32), (9, 64), (16, 32), (33, 64), (64, 32)])
@pytest.mark.parametrize("causal", [False, True])
def test_output_and_gradient(length: int, width: int, dtype: torch.dtype, causal: bool) -> None:
    check_output_and_gradient(short_attention, length, width, dtype, causal)


@pytest.mark.parametrize("causal", [False, True])
def test_the_operator_for_tracers(causal: bool) -> None:
    qkv, _ = made(5, 32, torch.float32)
    torch.library.opcheck(short_attention.custom, (qkv, causal))


def test_values_of_any_strides() -> None:
    check_values_of_any_strides(short_attention, 5)
