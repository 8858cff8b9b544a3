"""Rows of unit length, and a warning about rows that should have it."""

from __future__ import annotations

import math
import warnings

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megabatch.similarity.arguments import accumulator_dtype, extremes
from megabatch.torch_internals import transforms_active

#: Rows whose lengths are checked.
SAMPLE = 1024

#: Mean distance of rows' lengths from 1 above which rows count as not normalised.
TOLERANCE = 0.1


def unit_rows(features: Tensor, dtype: torch.dtype) -> Tensor:
    """Features as `F.normalize` scales them along their last dimension, in `dtype`.

    Computed in float32 (float64 for float64 features), so that half precision rounds once.
    """
    return F.normalize(features.to(accumulator_dtype(features.dtype)), dim=-1).to(dtype)


class LengthWarning:
    """Warns once if the first features that it sees are far from unit length.

    On a GPU the host does not wait: the first call starts the transfer of one number to the host,
    and the first later call that finds it there warns.
    """

    def __init__(self) -> None:
        self._done = False
        self._pending: Tensor | None = None  #: on the host; -1 until a GPU's number has arrived

    def look(self, features: Tensor, name: str) -> None:
        """Check features of the loss called `name`; does nothing in traced programs."""
        if self._done or torch.compiler.is_compiling():
            return
        deviation = _deviation_on_host(features) if self._pending is None else self._pending
        found = None if deviation is None else extremes(deviation)
        if found is None:
            return
        self._done = found[0] >= 0 or math.isnan(found[0])
        self._pending = None if self._done else deviation
        if found[0] > TOLERANCE:
            warnings.warn(
                f"{name}: the lengths of rows differ from 1 by {found[0]:.3g} on average, and "
                "this loss takes features as they are. Pass normalize=True for cosine "
                "similarities, as in libraries that normalise, or normalize=False for dot "
                "products.",
                stacklevel=6,  # the caller of the loss
            )


def _deviation_on_host(features: Tensor) -> Tensor | None:
    """Mean distance of rows' lengths from 1; None if there are none to check."""
    if type(features) not in (Tensor, nn.Parameter) or not features.numel():
        return None
    if features.device.type not in ("cpu", "cuda") or transforms_active():
        return None
    if features.is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    rows = features.detach()[:SAMPLE]
    lengths = torch.linalg.vector_norm(rows, dim=-1, dtype=accumulator_dtype(rows.dtype))
    deviation = (lengths - 1).abs().mean()
    if not features.is_cuda:
        return deviation
    arrived = torch.full_like(deviation, -1, device="cpu", pin_memory=True)
    return arrived.copy_(deviation, non_blocking=True)
