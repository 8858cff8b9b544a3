"""What is measured, and the features it is measured on."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Case:
    """One contender at one size."""

    loss: str
    contender: str
    device: str
    dtype: str
    b: int  #: rows of each side
    d: int  #: width
    scale: float

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype itself."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype


def features(b: int, d: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    """x and y (b, d) with rows of unit length, row i of one at a cosine of 0.5 to the other's.

    Pairs that belong together lie closer than others, as in training: on independent features all
    probabilities are 1/b, and a loss that lost part of its logits would hardly be seen.
    """
    generator = torch.Generator(device).manual_seed(0)
    x, y = (torch.empty(b, d, dtype=dtype, device=device) for _ in range(2))
    for i in range(0, b, 4096):  # in strips: the memory that this takes is not the contender's
        rows = min(4096, b - i)
        first, noise = (
            torch.nn.functional.normalize(
                torch.randn(rows, d, generator=generator, device=device), dim=1
            )
            for _ in range(2)
        )
        x[i : i + rows] = first
        y[i : i + rows] = torch.nn.functional.normalize(first + 3**0.5 * noise, dim=1)
    return x, y
