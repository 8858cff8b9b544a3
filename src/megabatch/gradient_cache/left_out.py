"""Finds loops that never call `backward()`, as was right when a step filled `.grad` itself.

Nothing else would tell: the optimizer leaves out parameters without a gradient.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook


class Unused:
    """A step's loss that nobody has called `backward()` of yet."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._parameters = {id(parameter) for parameter in parameters}
        self.optimizer_stepped = False
        _watch_optimizers()
        _unused.add(self)

    def used(self) -> None:
        """Its backward pass begins."""
        _unused.discard(self)

    def note(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer has stepped."""
        groups = optimizer.param_groups
        if any(
            id(parameter) in self._parameters for group in groups for parameter in group["params"]
        ):
            self.optimizer_stepped = True

    def raise_if_left_out(self) -> None:
        """Tell, before the next step, that this one's `backward()` was left out.

        A loss that was only looked at, or thrown away, with no optimizer step after it, is none.

        Raises:
            RuntimeError: an optimizer has changed its parameters since, or would have.
        """
        if self in _unused and self.optimizer_stepped:
            self.used()
            raise RuntimeError(
                "GradientCache: an optimizer stepped after the step before this one, but the loss "
                "of that was never backpropagated: call loss.backward() before optimizer.step() "
                "(a step fills .grad no longer by itself), or call the step under torch.no_grad() "
                "where its loss is only looked at"
            )


_unused: WeakSet[Unused] = WeakSet()


@functools.cache
def _watch_optimizers() -> None:
    register_optimizer_step_post_hook(_note_all)


def _note_all(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for unused in list(_unused):
        unused.note(optimizer)
