"""Operands of tiles other than features and pairs, on either backend."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class SigmoidParams(NamedTuple):
    """Scale, bias and weights, which turn products <x_i, y_j> into losses."""

    scale: Tensor  #: ()
    bias: Tensor  #: ()
    weight: Tensor | None  #: (m,)
    weight_divisor: Tensor | None = None  #: () by which float16's weights are divided


class Need(NamedTuple):
    """The inputs whose gradients are needed."""

    x: bool
    y: bool
    scale: bool
    bias: bool

    @property
    def features(self) -> bool:
        """Whether the gradient of x or of y is needed."""
        return self.x or self.y


class DeferredGrad(NamedTuple):
    """A gradient of features (n, d), stored until the backward pass multiplies it.

    For half-precision features it is stored in their dtype, divided by the number of x's rows, so
    that a loss that is a mean over these does not round it a second time.
    """

    values: Tensor  #: (n, d), or (0,) if it is not wanted
    row_scale: Tensor  #: (n,) powers of two by which float16's rows are divided; else (0,)

    @classmethod
    def like(cls, features: Tensor, wanted: bool) -> DeferredGrad:
        """An uninitialised gradient of `features`; empty if it is not wanted."""
        halves = wanted and features.dtype == torch.float16
        return cls(
            features.new_empty(features.shape if wanted else 0),
            features.new_empty(len(features) if halves else 0, dtype=torch.float32),
        )


class Teacher(NamedTuple):
    """The features, scale and bias of a teacher, which give soft targets or soft labels."""

    x: Tensor  #: (m, d')
    y: Tensor  #: (n, d')
    scale: Tensor  #: ()
    bias: Tensor | None = None  #: () of soft labels
