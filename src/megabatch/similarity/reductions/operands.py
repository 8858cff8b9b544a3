"""What the tiles of a reduction take beside features and pairs, on either backend."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Terms(NamedTuple):
    """The numbers that make a loss of the products <x_i, y_j>."""

    scale: Tensor  #: ()
    bias: Tensor  #: ()
    weight: Tensor | None  #: (m,)
    weight_size: Tensor | None = None  #: () by which float16's weights are divided


class Need(NamedTuple):
    """Which inputs' gradients are wanted."""

    x: bool
    y: bool
    scale: bool
    bias: bool

    @property
    def features(self) -> bool:
        """Whether any of the features'."""
        return self.x or self.y


class DeferredGrad(NamedTuple):
    """A gradient of features (n, d) until the backward pass, which multiplies it once more.

    Half precisions keep it in their dtype, as the gradient of a mean over x's rows: a loss that is
    such a mean rounds it no second time.
    """

    values: Tensor  #: (n, d), or (0,) if it is not wanted
    row_scale: Tensor  #: (n,) powers of two by which float16's rows are divided; else (0,)

    @classmethod
    def like(cls, features: Tensor, wanted: bool) -> DeferredGrad:
        """Room for one."""
        halves = wanted and features.dtype == torch.float16
        return cls(
            features.new_empty(features.shape if wanted else 0),
            features.new_empty(len(features) if halves else 0, dtype=torch.float32),
        )


class Teacher(NamedTuple):
    """The features and the numbers that soft targets or soft labels come from."""

    x: Tensor  #: (m, d')
    y: Tensor  #: (n, d')
    scale: Tensor  #: ()
    bias: Tensor | None = None  #: () of soft labels
