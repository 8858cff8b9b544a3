"""The learning rate at each step."""

from __future__ import annotations

import math

from megabatch.config.settings import TrainConfig

_POWER = {"none": 0.0, "sqrt": 0.5, "linear": 1.0}


def learning_rate(config: TrainConfig, step: int, total_steps: int) -> float:
    """The learning rate of step `step` (from 0) of `total_steps`, as OpenCLIP has it.

    Rises linearly to the peak in `config.warmup` steps. Then "cosine" follows half a cosine that
    would reach zero at `total_steps`; "const" stays; "const-cooldown" (also called "wsd", warm-up,
    stable, decay: Hu et al. 2024, arXiv 2404.06395) stays until the last `cooldown_steps` and falls
    in them to `config.lr_cooldown_end`.
    """
    peak = peak_learning_rate(config)
    if step < config.warmup:
        return peak * (step + 1) / config.warmup
    if config.lr_scheduler == "const":
        return peak
    if config.lr_scheduler == "cosine":
        done = (step - config.warmup) / (total_steps - config.warmup)
        return peak * (1 + math.cos(math.pi * done)) / 2
    length = cooldown_steps(config, total_steps)
    into = step - (total_steps - length)
    if into < 0:
        return peak
    end = config.lr_cooldown_end
    return end + (peak - end) * _left(config, into / length)


def peak_learning_rate(config: TrainConfig) -> float:
    """`lr` scaled by the batch size: lr * (global_batch_size / lr_base_batch_size) ** p.

    p is 0 for "none"; 1/2 for "sqrt", which keeps the noise of an Adam-like step (Krizhevsky 2014,
    arXiv 1404.5997; Malladi et al. 2022, arXiv 2205.10287); 1 for "linear" (Goyal et al. 2017,
    arXiv 1706.02677), meant for SGD.
    """
    ratio = config.global_batch_size / config.lr_base_batch_size
    return config.lr * float(ratio ** _POWER[config.lr_scaling])


def cooldown_steps(config: TrainConfig, total_steps: int) -> int:
    """Steps of the final fall: a fifth of the run where the configuration does not say."""
    if config.lr_cooldown is not None:
        return config.lr_cooldown
    return max(1, min(total_steps // 5, total_steps - config.warmup))


def _left(config: TrainConfig, done: float) -> float:
    """What is left of the height, from 1 at the fall's beginning to 0 at its end."""
    if config.lr_cooldown_shape == "1-sqrt":  # Haegele et al. 2024, arXiv 2405.18392
        return 1 - math.sqrt(done)
    if config.lr_cooldown_shape == "cosine":
        return (1 + math.cos(math.pi * done)) / 2
    return float((1 - done) ** config.lr_cooldown_power)
