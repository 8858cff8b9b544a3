"""The learning rate at each step."""

from __future__ import annotations

import math

from megabatch.training.config import TrainConfig


def learning_rate(config: TrainConfig, step: int, total_steps: int) -> float:
    """The learning rate of step `step` (from 0) of `total_steps`, as OpenCLIP has it.

    Rises linearly to `config.lr` in `config.warmup` steps; then follows half a cosine that would
    reach zero at `total_steps`, or stays.
    """
    if step < config.warmup:
        return config.lr * (step + 1) / config.warmup
    if config.lr_scheduler == "const":
        return config.lr
    done = (step - config.warmup) / (total_steps - config.warmup)
    return config.lr * (1 + math.cos(math.pi * done)) / 2
