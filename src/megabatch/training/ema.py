"""An exponential moving average of the weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn

_SUFFIX = "/ema"


class Ema:
    """Moving average of the trainable parameters, in float32.

    After step t (from 1) it moves towards the weights by 1 - min(decay, (1 + t) / (10 + t)): the
    smaller decay of the first steps soon forgets the initial weights, as in TensorFlow's
    ExponentialMovingAverage. All operations are elementwise, so each FSDP2 rank averages its own
    shard, and under DDP all ranks have the same average.

    Args:
        module: on its device, sharded if it will be, and not yet trained.
        decay: from 0 (the weights themselves) to below 1.
    """

    def __init__(self, module: nn.Module, decay: float) -> None:
        self.module = module
        self.decay = decay
        self._averages = {
            name: parameter.detach().float().clone()
            for name, parameter in module.named_parameters()
            if parameter.requires_grad
        }

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Include the weights after step `step`, from 1."""
        weight = 1 - min(self.decay, (1 + step) / (10 + step))
        parameters = dict(self.module.named_parameters())
        for name, average in self._averages.items():
            average.lerp_(parameters[name].detach().to(average.dtype), weight)

    def model_state(self) -> dict[str, Tensor]:
        """The module's `state_dict()` with averages instead of the trainable parameters."""
        state = self.module.state_dict()
        for name, average in self._averages.items():
            state[name] = average.to(state[name].dtype)
        return state

    def state_tensors(self) -> dict[str, Tensor]:
        """The averages as "parameter name/ema", for the checkpoint's optimizer tensors."""
        return {name + _SUFFIX: average for name, average in self._averages.items()}

    def load_state_tensors(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Restore from `state_tensors`; returns the other tensors.

        Raises:
            KeyError: an average is missing.
        """
        for name, average in self._averages.items():
            average.copy_(tensors[name + _SUFFIX])
        return {key: value for key, value in tensors.items() if not key.endswith(_SUFFIX)}
