"""An exponential moving average of the weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn

_KIND = "/ema"


class Ema:
    """The mean of the weights over the steps so far, later ones weighing more.

    After step t (from 1) the mean moves towards the weights by 1 - min(decay, (1 + t) / (10 + t)):
    early on the weights at the start are soon forgotten, as in TensorFlow's
    ExponentialMovingAverage. Kept in float32, of the trainable parameters alone; what is not
    trained is the module's. Every operation is elementwise, so each rank of FSDP2 averages its own
    shard, and under DDP all ranks hold the same mean.

    module: in place already (on its device, sharded), and not yet trained.
    decay: from 0 (the weights themselves) to below 1.
    """

    def __init__(self, module: nn.Module, decay: float) -> None:
        self.module = module
        self.decay = decay
        self._means = {
            name: parameter.detach().float().clone()
            for name, parameter in module.named_parameters()
            if parameter.requires_grad
        }

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take in the weights after step `step`, from 1."""
        weight = 1 - min(self.decay, (1 + step) / (10 + step))
        parameters = dict(self.module.named_parameters())
        for name, mean in self._means.items():
            mean.lerp_(parameters[name].detach().to(mean.dtype), weight)

    def model_state(self) -> dict[str, Tensor]:
        """The module's `state_dict()` with the means in the place of the parameters."""
        state = self.module.state_dict()
        for name, mean in self._means.items():
            state[name] = mean.to(state[name].dtype)
        return state

    def state_tensors(self) -> dict[str, Tensor]:
        """The means as "parameter name/ema": they stand beside the optimizer's state."""
        return {name + _KIND: mean for name, mean in self._means.items()}

    def load_state_tensors(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Put back what `state_tensors` gave, and return the other tensors.

        Raises:
            KeyError: a mean is missing.
        """
        for name, mean in self._means.items():
            mean.copy_(tensors[name + _KIND])
        return {key: value for key, value in tensors.items() if not key.endswith(_KIND)}
