"""Batch normalisation under gradient caching and on several processes.

Statistics are those of the samples that go through the model together: a process's micro-batch, the
same in both passes. So a run depends on the micro-batch size, and gradients are exact for that
function, not for one that normalises over the whole batch.
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


def explanation(module: nn.Module, config: TrainConfig, world: World) -> str:
    """A warning about the batch statistics of this run; "" without batch normalisation."""
    layers = len(batch_norms(module))
    if not layers:
        return ""
    rows = min(unmeasured_micro_batch(config), -(-config.global_batch_size // world.size))
    alone = ""
    if world.size > 1:
        alone = " on each process alone, and keeps rank 0's running statistics"
    return (
        f"warning: {config.model} has batch normalisation ({plural(layers, 'layer')}). It "
        f"normalises over {plural(rows, 'pair')} at a time{alone}: --micro-batch-size changes "
        "what is learnt"
    )
