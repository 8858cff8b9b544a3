"""The time of a step of the trainer, split into its parts.

Marks are set where a part begins or ends: around the towers' `encode_image` and `encode_text`, the
objective, the gradients of its features and the optimizer's step. The time from a mark to the next
one belongs to the part that the first one begins, so the parts add up to the step. On a GPU marks
are CUDA events in the trainer's stream: they wait for nothing, and the parts are those of the GPU,
idle time included.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megabatch.training.trainer import Trainer

WAITING = "between micro-batches"  #: of the first pass: inputs that are not there yet, sorting
#: From the loss's gradient to the first of the second passes, once in a step.
AFTER_LOSS = "after the loss"
BACKWARD = "backward pass"


class Parts:
    """Splits a step of a trainer while it is entered; afterwards `seconds()` has its parts.

    Args:
        repeats: how many times the loss gets the features, as if the batch were so much larger.
    """

    def __init__(self, trainer: Trainer, repeats: int = 1) -> None:
        self._trainer, self._repeats = trainer, repeats
        self._on_gpu = trainer.device.type == "cuda"
        self._marks: list[tuple[str, Any]] = []
        self._undo: list[Callable[[], None]] = []
        self._second = False  # whether the loss's gradient is known

    def __enter__(self) -> Parts:
        module, objective = self._trainer.module, self._trainer.objective
        for tower in ("image", "text"):
            self._wrap(module, f"encode_{tower}", self._around_tower(tower))
        self._wrap(objective, "forward", self._around_loss)
        optimizer = self._trainer.optimizer
        for handle in (
            optimizer.register_step_pre_hook(lambda *_: self.mark("optimizer")),
            optimizer.register_step_post_hook(lambda *_: self.mark("rest")),
        ):
            self._undo.append(handle.remove)
        self.mark(WAITING)
        return self

    def __exit__(self, *_: object) -> None:
        self.mark("end")
        for undo in self._undo:
            undo()

    def seconds(self) -> dict[str, float]:
        """The time of each part."""
        if self._on_gpu:
            torch.cuda.synchronize()
        found: dict[str, float] = {}
        for (name, begin), (_, end) in itertools.pairwise(self._marks):
            took = begin.elapsed_time(end) / 1e3 if self._on_gpu else end - begin
            found[name] = found.get(name, 0.0) + took
        return found

    def _wrap(self, module: Any, name: str, around: Callable[..., Any]) -> None:
        """Replace a method on the instance until the end."""
        own = getattr(module, name)
        setattr(module, name, lambda *args, **kwargs: around(own, *args, **kwargs))
        self._undo.append(lambda: delattr(module, name))

    def _around_tower(self, tower: str) -> Callable[..., Tensor]:
        def call(encode: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
            which = "second" if self._second else "first"
            self.mark(f"{tower}s, {which} pass")
            features = encode(*args, **kwargs)
            self.mark(BACKWARD if self._second else WAITING)
            return features

        return call

    def _around_loss(self, objective: Callable[..., Tensor], **given: Any) -> Tensor:
        self.mark("loss")
        for name in ("image_features", "text_features"):
            if self._repeats > 1:
                given[name] = given[name].repeat(self._repeats, 1)
            if given[name].requires_grad:
                given[name].register_hook(self._end_of_loss)
        return objective(**given)

    def _end_of_loss(self, _: Tensor) -> None:
        self._second = True
        self.mark(AFTER_LOSS)

    def mark(self, name: str) -> None:
        """End the part before, and begin this one."""
        if not self._on_gpu:
            self._marks.append((name, time.perf_counter()))
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append((name, event))
