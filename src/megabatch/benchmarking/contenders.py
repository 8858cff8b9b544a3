"""Who is measured: losses, and for each the implementations that stand side by side."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megabatch.benchmarking import truth
from megabatch.errors import UsageError

#: (x (b, d), y (b, d), scale ()) -> loss ()
LossFunction = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Contender:
    """One implementation. `load` imports what it needs; `needs`: a package that may be missing."""

    name: str
    summary: str
    load: Callable[[], LossFunction]
    needs: tuple[str, str] | None = None  #: (module, what pip calls it)

    def installed(self) -> bool:
        """Whether it can be measured here."""
        return self.needs is None or importlib.util.find_spec(self.needs[0]) is not None


@dataclass(frozen=True)
class Loss:
    """One loss: its implementations, its exact value, and the work that none of them can avoid."""

    name: str
    contenders: dict[str, Contender]
    truth: Callable[[Tensor, Tensor, float], truth.Truth]
    work: int  #: multiplications and additions, forward and backward, in units of b²d

    def choose(self, names: tuple[str, ...]) -> list[Contender]:
        """The contenders of these names; none given: all that are installed.

        Raises:
            UsageError: a name is not known, given twice, or its package is missing.
        """
        if not names:
            return [c for c in self.contenders.values() if c.installed()]
        for name in names:
            if name not in self.contenders:
                known = ", ".join(self.contenders)
                raise UsageError(f"--contenders {name}: expected some of {known}")
            if names.count(name) > 1:
                raise UsageError(f"--contenders {name}: given {names.count(name)} times")
            contender = self.contenders[name]
            if contender.needs is not None and not contender.installed():
                raise UsageError(f"--contenders {name}: needs pip install {contender.needs[1]}")
        return [self.contenders[name] for name in names]


def _megabatch() -> LossFunction:
    from megabatch import ClipLoss

    return ClipLoss()


def _dense() -> LossFunction:
    from megabatch.similarity.dense import clip_loss

    return clip_loss


def _two_products() -> LossFunction:
    return two_products


def _openclip() -> LossFunction:
    import open_clip

    return open_clip.ClipLoss()


def two_products(x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
    """Each direction's logits from a product of its own, the features scaled first."""
    images, texts = scale * x @ y.T, scale * y @ x.T
    labels = torch.arange(len(x), device=x.device)
    return (F.cross_entropy(images, labels) + F.cross_entropy(texts, labels)) / 2


def _by_name(*contenders: Contender) -> dict[str, Contender]:
    return {contender.name: contender for contender in contenders}


CLIP = Loss(
    "clip",
    _by_name(
        Contender("megabatch", "megabatch.ClipLoss: tiles, no matrix", _megabatch),
        Contender("dense", "one matrix, two cross-entropies", _dense),
        Contender("two-products", "as OpenCLIP writes it: two matrices", _two_products),
        Contender("openclip", "open_clip.ClipLoss", _openclip, ("open_clip", "open_clip_torch")),
    ),
    truth.clip,
    work=8,  # the matrix 2, the matrix again 2, its two products with the features 2 each
)

LOSSES = {loss.name: loss for loss in (CLIP,)}
