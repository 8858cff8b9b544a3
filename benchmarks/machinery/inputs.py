"""The cases of a benchmark and their features."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize

#: Features repeat after this many rows. The loss of copies follows from the loss of one, so the
#: exact result is known also for sizes that are too large for float64.
PERIOD = 65_536
_STRIP = 4096


@dataclass(frozen=True)
class Case:
    """One contender at one size."""

    loss: str
    contender: str
    device: str
    dtype: str
    b: int  #: rows of x, and of y where n does not say otherwise
    d: int  #: width
    scale: float
    n: int | None = None  #: rows of y
    features: str = "pairs"  #: a key of FEATURES
    tf32: bool = False  #: float32 products may be in TF32
    backward: bool = True  #: the gradients too

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype itself."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype


def features(
    b: int, d: int, dtype: torch.dtype, device: str, kind: str = "pairs", n: int | None = None
) -> tuple[Tensor, Tensor]:
    """x (b, d) and y (n, d) with rows of unit length; row i of one belongs to row i of the other.

    The same every time, and again after `PERIOD` rows.
    """
    generator = torch.Generator(device).manual_seed(0)
    n = b if n is None else n
    x, y = (torch.empty(rows, d, dtype=dtype, device=device) for rows in (b, n))
    different = min(max(b, n), PERIOD)
    for i in range(0, different, _STRIP):  # in strips, to save memory
        rows = min(_STRIP, different - i)
        first, second = FEATURES[kind](rows, d, generator)
        x[i : i + rows] = first[: max(0, b - i)]
        y[i : i + rows] = second[: max(0, n - i)]
    for side in (x, y):
        for i in range(PERIOD, len(side), PERIOD):
            side[i : i + PERIOD] = side[: min(PERIOD, len(side) - i)]
    return x, y


def _unit(rows: int, d: int, generator: torch.Generator) -> Tensor:
    return normalize(torch.randn(rows, d, generator=generator, device=generator.device), dim=1)


def _common(rows: int, d: int, generator: torch.Generator) -> Tensor:
    """Rows that all strips share."""
    return _unit(rows, d, torch.Generator(generator.device).manual_seed(1))


def _at_cosine(first: Tensor, cosine: Tensor, direction: Tensor) -> Tensor:
    """Unit rows with these cosines to the rows of `first`, rotated towards `direction`."""
    across = direction - (direction * first).sum(1, keepdim=True) * first
    return cosine * first + (1 - cosine**2).sqrt() * normalize(across, dim=1)


def _pairs(rows: int, d: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Pairs at a cosine of 0.5, all others around 0.

    With independent features all probabilities are 1/b, and a loss that misses some of its logits
    would go unnoticed.
    """
    first, noise = (_unit(rows, d, generator) for _ in range(2))
    return first, normalize(first + 3**0.5 * noise, dim=1)


def _trained(rows: int, d: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Pairs at cosines from 0.3 to 0.9; 256 clusters, within which x's cosines are near 0.64."""
    centres = _common(256, d, generator)
    device = generator.device
    cluster = torch.randint(len(centres), (rows,), generator=generator, device=device)
    first = _at_cosine(
        centres[cluster], torch.full((rows, 1), 0.8, device=device), _unit(rows, d, generator)
    )
    cosine = 0.3 + 0.6 * torch.rand(rows, 1, generator=generator, device=device)
    return first, _at_cosine(first, cosine, _unit(rows, d, generator))


def _opposed(rows: int, d: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Pairs at a cosine of -0.5: each positive lies far below its negatives."""
    first = _unit(rows, d, generator)
    cosine = torch.full((rows, 1), -0.5, device=generator.device)
    return first, _at_cosine(first, cosine, _unit(rows, d, generator))


def _antipodal(rows: int, d: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """All of x near the opposite of all of y: every logit is near -scale."""
    axis = _common(1, d, generator)
    first, second = (0.2 * _unit(rows, d, generator) for _ in range(2))
    return normalize(first + axis, dim=1), normalize(second - axis, dim=1)


#: (rows, width, generator) -> (x, y)
FEATURES: dict[str, Callable[[int, int, torch.Generator], tuple[Tensor, Tensor]]] = {
    "pairs": _pairs,
    "trained": _trained,
    "opposed": _opposed,
    "antipodal": _antipodal,
}
