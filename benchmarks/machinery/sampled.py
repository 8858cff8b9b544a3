"""Steps in which only some micro-batches go through the towers, to extrapolate the time of all.

The batch is whole otherwise: its inputs, its features with their gradients and its loss, so that
the peak of memory is that of a whole step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn


class Sampled:
    """While it is entered, towers run on `real` of each pass's `total` micro-batches.

    These are evenly spaced, the first and the last among them. The others get the features of the
    last one before them, with a gradient of zero.

    Args:
        module: has `encode_image` and `encode_text`.
        total, real: numbers of micro-batches.
        on_skip: called instead of a tower. before: called before one.
        ddp: all parameters get this gradient, as DDP waits for all of them. Otherwise only the
            smallest one does, which takes less time.
    """

    def __init__(
        self,
        module: nn.Module,
        total: int,
        real: int,
        on_skip: Callable[[], None] = lambda: None,
        before: Callable[[], None] = lambda: None,
        *,
        ddp: bool = False,
    ) -> None:
        if not min(2, total) <= real <= total:
            raise ValueError(f"real: expected 2 to {total} micro-batches, got {real}")
        self._module = module
        self._on_skip, self._before = on_skip, before
        trained = [p for p in module.parameters() if p.requires_grad]
        self._parameters = trained if ddp else [min(trained, key=torch.numel)]
        self._total = total
        self._real = {round(i * (total - 1) / max(1, real - 1)) for i in range(real)}
        self._undo: list[Callable[[], None]] = []

    def __enter__(self) -> Sampled:
        module = self._module
        for name in ("encode_image", "encode_text"):
            own = getattr(module, name)
            wrapped_already = name in vars(module)
            self._undo.append(
                functools.partial(setattr, module, name, own)
                if wrapped_already
                else functools.partial(delattr, module, name)
            )
            setattr(module, name, self._around(own))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for undo in self._undo:
            undo()

    def _around(self, encode: Callable[..., Tensor]) -> Callable[..., Tensor]:
        calls = 0
        last: Tensor | None = None

        def call(inputs: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            nonlocal calls, last
            position, calls = calls % self._total, calls + 1
            if last is None or position in self._real:
                self._before()
                features = encode(inputs, *args, **kwargs)
                last = features.detach()
                return features
            self._on_skip()
            times = -(-len(inputs) // len(last))  # with equal tokens, rows differ
            return last.repeat(times, 1)[: len(inputs)] + self._nothing()

        return call

    def _nothing(self) -> Tensor | float:
        """0, by way of parameters if there is a graph."""
        if not torch.is_grad_enabled():
            return 0.0
        return 0 * torch.stack([p.reshape(-1)[0] for p in self._parameters]).sum()
