"""The training step and its state: model, optimizer, loss scale, moving average."""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from megabatch.config.objective import Objective, create_objective
from megabatch.config.settings import TrainConfig, with_precision
from megabatch.data import Batch
from megabatch.errors import OutOfMemory, UsageError, one_line
from megabatch.gradient_cache import UnusedParameters
from megabatch.models.blocks import checkpoint_activations, compile_blocks, use_fast_blocks
from megabatch.models.float8 import use_float8
from megabatch.models.padding import Lengths
from megabatch.models.towers import Tower, locked_towers, set_modes
from megabatch.planning.memory import AUTOCAST
from megabatch.torch_internals import is_compile_error
from megabatch.training.checkpoint import Checkpoint, TrainingStopped
from megabatch.training.ema import Ema
from megabatch.training.encoders import CachedStep
from megabatch.training.micro_batch import Division, Trials
from megabatch.training.optimizer import (
    create_optimizer,
    learning_rate,
    load_state_tensors,
    state_tensors,
)
from megabatch.training.parallel import full, lay_out
from megabatch.training.world import World

_SMALLEST_SCALE = 2.0**-10  # of an fp16 loss; an overflow below it means infinity


class Trainer:
    """Trains a model, one batch at a time.

    A step depends only on the weights, the optimizer's state, the batch and the step's number: its
    random numbers (dropout, patch dropout) derive from the seed, the number and the rank. So a
    resumed run draws the same numbers as an uninterrupted one, and checkpoints need no random
    state.

    With several processes all of them call every method together, `train_step` with each one's
    share of the batch.

    Attributes:
        step: number of steps done.
        division: how many pairs go through the towers at a time, and how many of them once.
    """

    def __init__(
        self,
        config: TrainConfig,
        module: nn.Module,
        device: torch.device,
        total_steps: int,
        world: World | None = None,
        lengths: Mapping[Tower, Lengths] | None = None,
        objective: Objective | None = None,
        tell: Callable[[str], None] = print,
    ) -> None:
        """Prepare the module for the device and the processes.

        `lengths`: of `Towers`; with `trim_texts` texts are encoded without padding.
        `objective`: the loss; default: the one that the configuration names.
        `tell` is called with lines for the user on choices and compilation.
        """
        self.config = config = with_precision(config, device.type)
        self.device = device
        self.total_steps = total_steps
        self.world = world or World(device)
        self.step = 0
        if config.precision == "fp8":
            use_float8(module)
        self.module = set_modes(module.to(device))
        if config.torchcompile:
            use_fast_blocks(self.module)
        if config.grad_checkpointing:
            checkpoint_activations(self.module)
        trimmed = (lengths or {}) if config.trim_texts else {}
        if config.torchcompile:
            compile_blocks(self.module, trimmed)
        self.layout = lay_out(self.module, config.parallel, self.world)
        self.optimizer = create_optimizer(self.module, config)
        self.ema = None if config.ema_decay is None else Ema(self.module, config.ema_decay)
        enabled = config.precision == "fp16"
        self.scaler = torch.amp.GradScaler(device.type, enabled=enabled)
        self.objective = (objective or create_objective(config)).to(device)
        self._lengths = trimmed
        self.division = Division(config, self.layout, tell)
        self._step = self._divided()

    def train_step(self, batch: Batch) -> dict[str, float]:
        """Do one step; returns figures for the log, the same on every rank.

        With fp16 an overflow of the gradient is normal: the scaler leaves the step out and lowers
        its scale.

        After the backward pass the host waits for the device, to learn whether both are finite (and
        GradientCache compares the scales of several micro-batches before it). The optimizer's step
        runs while the host prepares the next batch.

        Raises:
            UsageError: a parameter gets no gradient, for which DDP would wait.
            TrainingStopped: the loss or the gradient is not finite; no weight has changed.
            OutOfMemory: memory runs out; the message says what takes less.
        """
        lr = learning_rate(self.config, self.step, self.total_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        with self._explained():
            if self.division.measures and self.division.start(self._trials(batch)):
                self._step = self._divided()
            _seed_everything(self.config.seed, self.step, self.world.rank)
            self._step.cache.kept_micro_batches = self.division.kept
            loss, norm = self._gradients(batch)
        if not math.isfinite(loss) or not (math.isfinite(norm) or self.scaler.is_enabled()):
            self.optimizer.zero_grad(set_to_none=True)
            raise TrainingStopped(
                f"step {self.step + 1}: loss {loss:g}, gradient norm {norm:g}; the step was not "
                "taken (a lower --lr, a longer --warmup, --grad-clip-norm or --precision fp32 help)"
            )
        self.scaler.step(self.optimizer)  # skips the step itself if fp16 overflowed
        self.scaler.update()
        if not math.isfinite(norm) and self.scaler.get_scale() < _SMALLEST_SCALE:
            raise TrainingStopped(
                f"step {self.step + 1}: the gradient overflows fp16 even unscaled "
                "(--precision bf16 or fp32 helps)"
            )
        self.optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            self.logit_scale.clamp_(0, math.log(self.config.max_logit_scale))
        self.step += 1
        if self.ema is not None and math.isfinite(norm):
            self.ema.update(self.step)
        if self.division.measures and self.division.after_step(self._trials(batch)):
            self._step = self._divided()
        return _finite({"loss": loss, "lr": lr, "grad_norm": norm})

    def scale_values(self) -> dict[str, float]:
        """Figures for the log of the scale; all ranks call it. It waits for the device."""
        return _finite({"logit_scale": full(self.logit_scale.detach()).exp().item()})

    @property
    def logit_scale(self) -> nn.Parameter:
        """The parameter: the log of the scale."""
        return self.module.get_parameter("logit_scale")

    def checkpoint(self, **state: Any) -> Checkpoint:
        """A checkpoint of everything here, with further `state`; tensors are on rank 0 only."""
        own = {
            "step": self.step,
            "total_steps": self.total_steps,
            "scaler": self.scaler.state_dict(),
            "division": self.division.state(),
        }
        optimizer = state_tensors(self.module, self.optimizer)
        if self.ema is not None:
            optimizer |= self.ema.state_tensors()
        return Checkpoint(self.weights(), self.layout.gather(optimizer), {**own, **state})

    def weights(self, *, ema: bool = False) -> dict[str, Tensor]:
        """The module's full tensors by name, or their moving average, on rank 0; {} elsewhere."""
        if not ema:
            return self.layout.gather(self.module.state_dict())
        assert self.ema is not None
        return self.layout.gather(self.ema.model_state())

    def restore(self, checkpoint: Checkpoint) -> None:
        """Restore a checkpoint of any number of ranks; its tensors are needed on rank 0 only.

        Raises:
            TrainingStopped: it is of another model, whose code may have changed.
        """
        weights = self.layout.scatter(checkpoint.model)
        try:
            self.module.load_state_dict(weights)
        except RuntimeError as error:
            raise TrainingStopped(
                f"--resume: the checkpoint is of another model than {self.config.model} is now: "
                f"{one_line(error, 300)}"
            ) from error
        tensors = self.layout.scatter(checkpoint.optimizer)
        if self.ema is not None:
            tensors = self.ema.load_state_tensors(tensors)
        load_state_tensors(self.module, self.optimizer, tensors)
        if self.scaler.is_enabled():
            self.scaler.load_state_dict(checkpoint.state["scaler"])
        self.step = checkpoint.state["step"]
        self.division.load_state(checkpoint.state["division"])
        self._step = self._divided()

    def _divided(self) -> CachedStep:
        """The step with micro-batches as `division` has them now."""
        config = self.config
        # Each text comes with its hard negatives, which are as long as the longest of them.
        tokens = (config.micro_batch_tokens or 0) // (1 + config.hard_negatives)
        return CachedStep(
            self.layout.model,
            self.objective,
            self.division.rows,
            micro_batch_tokens=None if config.micro_batch_tokens is None else max(1, tokens),
            locked=locked_towers(self.module),
            lengths=self._lengths,
            after_loss=self.division.after_loss if self.division.measures else None,
            device=self.device,
            # The dtype to which losses cast features; but Matryoshka prefixes are normalised first.
            feature_dtype=None if config.matryoshka_dims else AUTOCAST.get(config.precision),
        )

    def _trials(self, batch: Batch) -> Trials:
        return Trials(self._step, batch, self._autocast)

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.config.precision == "fp32":
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, AUTOCAST[self.config.precision])

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Say what helps if memory runs out or compilation fails."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            raise OutOfMemory(f"rank {self.world.rank}: {self.division.less_memory()}") from error
        except RuntimeError as error:
            if not is_compile_error(error):
                raise
            raise TrainingStopped(
                f"rank {self.world.rank}: torch.compile fails (--no-torchcompile trains without "
                f"it): {one_line(error, 200)}"
            ) from error

    def _gradients(self, batch: Batch) -> tuple[float, float]:
        """Fill the gradients, unscaled and clipped; returns global loss and norm before clipping.

        One synchronisation of gradients: GradientCache's, in the last micro-batch.
        """
        takes_ids = "ids" in self.objective.takes
        if takes_ids and batch.ids is None:
            raise ValueError(f"batch.ids: expected ids of the captions, for {self.config.loss}")
        with self.world.failures(f"step {self.step + 1}"):
            with self._autocast():
                loss = self._step(batch, batch.ids if takes_ids else None)
            try:
                self.scaler.scale(loss).backward()
            except UnusedParameters as error:
                raise UsageError(
                    "--parallel: ddp needs a gradient of every trainable parameter, but there is "
                    f"none of {error.names}"
                ) from error
            self.layout.end_step()
            self.scaler.unscale_(self.optimizer)
            parameters = list(self.module.parameters())
            gradients = [p.grad for p in parameters if p.grad is not None]
            norm = full(torch.nn.utils.get_total_norm(gradients))  # over all shards, too
            if self.config.grad_clip_norm is not None:
                limit = self.config.grad_clip_norm
                torch.nn.utils.clip_grads_with_norm_(parameters, limit, norm)
            both = (figure.detach().to(self.device, torch.float64) for figure in (loss, norm))
            own, total = torch.stack(tuple(both)).tolist()
            # The mean over ranks of their losses is the mean over all rows.
            return self.world.mean(own), total


def _finite(values: dict[str, float]) -> dict[str, float]:
    """The values that are: JSON has no NaN or infinity."""
    return {name: value for name, value in values.items() if math.isfinite(value)}


def _seed_everything(seed: int, step: int, rank: int) -> None:
    (word,) = np.random.SeedSequence((seed, step, rank)).generate_state(1, np.uint64)
    torch.manual_seed(int(word))
    random.seed(int(word))
    np.random.seed([seed, step, rank])
