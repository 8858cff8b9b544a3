"""One training step, and everything that a step changes."""

from __future__ import annotations

import contextlib
import math
import random
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch import nn

from megabatch.data import Batch
from megabatch.errors import UsageError
from megabatch.models.locking import set_modes
from megabatch.training.checkpoint import Checkpoint
from megabatch.training.config import TrainConfig
from megabatch.training.ema import Ema
from megabatch.training.encoders import CachedStep
from megabatch.training.objective import create_objective
from megabatch.training.optimizer import (
    create_optimizer,
    load_state_tensors,
    set_learning_rate,
    state_tensors,
)
from megabatch.training.schedule import learning_rate

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


class TrainingStopped(UsageError):
    """Training cannot go on; what was saved before stays good."""

    exit_code = 1  # not a mistake in the command


class Trainer:
    """Steps one model through batches.

    A step depends on the weights, the optimizer's state, its batch and its number alone: its
    random numbers (dropout, patch dropout) come from the seed and the number. So a run that is
    continued from a checkpoint draws what the uninterrupted one would, with no random state kept.

    step: number of steps done.
    """

    def __init__(
        self, config: TrainConfig, module: nn.Module, device: torch.device, total_steps: int
    ) -> None:
        self.config = config
        self.device = device
        self.total_steps = total_steps
        self.step = 0
        self.module = set_modes(module.to(device))
        self.optimizer = create_optimizer(self.module, config)
        self.ema = None if config.ema_decay is None else Ema(self.module, config.ema_decay)
        enabled = config.precision == "fp16"
        self.scaler = torch.amp.GradScaler(device.type, enabled=enabled)
        self.objective = create_objective(config)
        self._step = CachedStep(
            self.module,
            self.objective,
            config.micro_batch_size,
            device=device,
            scaler=self.scaler if enabled else None,
        )

    def train_step(self, batch: Batch) -> dict[str, float]:
        """Do one step; returns what is worth logging of it.

        Raises:
            TrainingStopped: the loss or the gradient is not finite; nothing has changed then.
        """
        _seed_everything(self.config.seed, self.step)
        lr = learning_rate(self.config, self.step, self.total_steps)
        set_learning_rate(self.optimizer, lr)
        ids = getattr(batch, "ids", None) if self.objective.takes_ids else None
        with self._autocast():
            loss = self._step(batch, ids).item()
        gradient_norm = self._gradient_norm()
        skipped = self.scaler.is_enabled() and not math.isfinite(gradient_norm)
        if not math.isfinite(loss) or not (math.isfinite(gradient_norm) or skipped):
            self.optimizer.zero_grad(set_to_none=True)
            raise TrainingStopped(self._not_finite(loss, gradient_norm))
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            self.logit_scale.clamp_(0, math.log(self.config.max_logit_scale))
        self.step += 1
        if self.ema is not None and not skipped:
            self.ema.update(self.step)
        values = {"loss": loss, "lr": lr, "logit_scale": self.logit_scale.exp().item()}
        # A step that overflowed in fp16 is left out by the scaler, and its norm is no number.
        return values if skipped else {**values, "grad_norm": gradient_norm}

    @property
    def logit_scale(self) -> nn.Parameter:
        """The logarithm of the scale."""
        parameter = self.module.logit_scale
        assert isinstance(parameter, nn.Parameter)
        return parameter

    def checkpoint(self, **state: Any) -> Checkpoint:
        """All of this as a checkpoint, with `state` beside it."""
        own = {
            "step": self.step,
            "total_steps": self.total_steps,
            "scaler": self.scaler.state_dict(),
        }
        optimizer = state_tensors(self.module, self.optimizer)
        if self.ema is not None:
            optimizer |= self.ema.state_tensors()
        return Checkpoint(self.module.state_dict(), optimizer, {**own, **state})

    def restore(self, checkpoint: Checkpoint) -> None:
        """Be where the checkpoint was made."""
        self.module.load_state_dict(checkpoint.model)
        tensors = checkpoint.optimizer
        if self.ema is not None:
            tensors = self.ema.load_state_tensors(tensors)
        load_state_tensors(self.module, self.optimizer, tensors)
        if self.scaler.is_enabled():
            self.scaler.load_state_dict(checkpoint.state["scaler"])
        self.step = checkpoint.state["step"]

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.config.precision == "fp32":
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, _AUTOCAST[self.config.precision])

    def _gradient_norm(self) -> float:
        """The norm before clipping; clips if the configuration says so."""
        self.scaler.unscale_(self.optimizer)
        limit = self.config.grad_clip_norm
        parameters = list(self.module.parameters())
        return torch.nn.utils.clip_grad_norm_(parameters, limit or math.inf).item()

    def _not_finite(self, loss: float, gradient_norm: float) -> str:
        return (
            f"step {self.step + 1}: loss {loss:g}, gradient norm {gradient_norm:g}; the step was "
            "not taken (a lower --lr, a longer --warmup, --grad-clip-norm or --precision fp32 help)"
        )


def _seed_everything(seed: int, step: int) -> None:
    torch.manual_seed((seed << 32) + step)
    random.seed((seed << 32) + step)
    np.random.seed([seed, step])
