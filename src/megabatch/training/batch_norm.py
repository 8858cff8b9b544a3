"""Batch normalisation under gradient caching and on several processes.

Statistics are those of the samples that go through the model together: a process's micro-batch, the
same in both passes. So a run depends on the micro-batch size, and gradients are exact for that
function, not for one that normalises over the whole batch. Synchronised, the statistics are those
of all processes' current micro-batches, at the cost of a collective per layer and pass.
"""

from __future__ import annotations

from torch import nn

from megabatch.config.settings import TrainConfig, unmeasured_micro_batch
from megabatch.errors import plural
from megabatch.gradient_cache.state import BATCH_NORMS
from megabatch.training.world import World


def batch_norms(module: nn.Module) -> list[nn.Module]:
    """The layers that use batch statistics: those of a locked tower do not."""
    return [m for m in module.modules() if isinstance(m, BATCH_NORMS) and m.training]


def problems(config: TrainConfig, world: World) -> list[str]:
    """Reasons why batch normalisation cannot be synchronised as configured."""
    if not config.use_bn_sync or world.size == 1:
        return []
    if world.device.type != "cuda":
        return ["--use-bn-sync: torch synchronises batch normalisation on GPUs only"]
    if config.global_batch_size % world.size:
        return [
            f"--use-bn-sync: --global-batch-size {config.global_batch_size} over {world.size} "
            "processes, expected as many on each"
        ]
    return []


def synchronise(module: nn.Module, world: World) -> nn.Module:
    """Convert a module's batch normalisation to statistics over all processes; same parameters."""
    if world.size == 1 or not batch_norms(module):
        return module
    # Not torch's own conversion, which drops the activation inside of timm's layers.
    from timm.layers import convert_sync_batchnorm

    converted: nn.Module = convert_sync_batchnorm(module)
    return converted


def explanation(module: nn.Module, config: TrainConfig, world: World) -> str:
    """A warning about the batch statistics of this run; "" without batch normalisation."""
    layers = len(batch_norms(module))
    if not layers:
        return ""
    rows = min(unmeasured_micro_batch(config), -(-config.global_batch_size // world.size))
    over = f"{plural(rows, 'pair')} at a time"
    hint = ""
    if world.size > 1 and config.use_bn_sync:
        over = f"{rows * world.size:,} pairs at a time, {rows:,} of each process"
    elif world.size > 1:
        over += " on each process alone, and keeps rank 0's running statistics"
        hint = " (--use-bn-sync takes those of all processes)"
    return (
        f"warning: {config.model} has batch normalisation ({plural(layers, 'layer')}). It "
        f"normalises over {over}: --micro-batch-size changes what is learnt{hint}"
    )
