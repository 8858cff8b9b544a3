"""The repeated blocks of a model, the units of sharding, checkpointing and compilation."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

from torch import nn
from torch.utils.checkpoint import checkpoint


def blocks(module: nn.Module) -> list[nn.Module]:
    """The blocks of a transformer or residual network; in a model without any, its towers.

    Blocks are composite modules of one class that a list or sequence repeats.
    """
    found = list(_blocks(module))
    return found or [child for child in module.children() if _is_composite(child)]


def checkpoint_activations(module: nn.Module) -> None:
    """Keep only the blocks' inputs for the backward pass, which recomputes the rest."""
    for block in blocks(module):
        forward: Callable[..., object] = block.forward
        block.forward = functools.partial(checkpoint, forward, use_reentrant=False)


def compile_blocks(module: nn.Module) -> None:
    """Compile each block in place with torch.compile; parameters keep their names.

    Identical blocks share one compiled graph, and FSDP2's hooks stay outside of it.
    """
    for block in blocks(module):
        block.compile()


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        members = list(child.children())
        alike = len({type(member) for member in members}) == 1
        listed = isinstance(child, nn.ModuleList)
        repeated = isinstance(child, nn.Sequential) and len(members) > 1
        if alike and (listed or repeated) and all(map(_is_composite, members)):
            yield from members
        else:
            yield from _blocks(child)


def _is_composite(module: nn.Module) -> bool:
    has_children = next(module.children(), None) is not None
    return has_children and next(module.parameters(), None) is not None
