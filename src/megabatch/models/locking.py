"""Locked towers (Zhai et al. 2022, "LiT", arXiv 2111.07991): pretrained and not trained further."""

from __future__ import annotations

from typing import Any

from torch import nn

from megabatch.errors import UsageError
from megabatch.models.layers import FIRST, Tower, tower_parameters


def lock(
    module: nn.Module, tower: Tower, *, unlocked: int = 0, freeze_bn_stats: bool = False
) -> None:
    """Lock a tower but for its last `unlocked` groups of layers, as the model itself counts them.

    Args:
        module: of `Towers`.
        tower: "image" (the first) or "text".
        unlocked: of open_clip's transformers a group is a layer, the projection the last one.
        freeze_bn_stats: batch normalisation keeps its running statistics too; "image" only.

    Raises:
        UsageError: the model cannot lock this tower like that.
    """
    whose: Any = module
    option = f"--lock-{tower}"
    parameters = tower_parameters(module)[tower].values()
    try:
        if tower == "image":
            whose.lock_image_tower(unlocked_groups=unlocked, freeze_bn_stats=freeze_bn_stats)
        else:
            whose.lock_text_tower(unlocked_layers=unlocked)
    except Exception as error:  # of the architecture's own library
        raise UsageError(f"{option}: {error or type(error).__name__}") from error
    if all(parameter.requires_grad for parameter in parameters):
        raise UsageError(
            f"{option}: with {unlocked} groups unlocked nothing of the {tower} tower stays locked"
        )


def locked_towers(module: nn.Module) -> frozenset[Tower]:
    """The towers that no gradient is needed of: each runs once a step."""
    towers = tower_parameters(module)
    return frozenset(
        tower
        for tower, parameters in towers.items()
        if not any(parameter.requires_grad for parameter in parameters.values())
    )


def set_modes(module: nn.Module) -> nn.Module:
    """Put a module in training mode, but its wholly locked towers in evaluation mode.

    A locked tower's features are then a function of the sample alone: no dropout, no dropped
    patches, no statistics of the micro-batch.
    """
    module.train()
    locked = locked_towers(module)
    for name, child in module.named_children():
        tower: Tower = "image" if f"{name}.".startswith(FIRST) else "text"
        if tower in locked:
            child.eval()
    return module
