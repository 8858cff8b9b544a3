"""Locked towers (Zhai et al. 2022, "LiT", arXiv 2111.07991): pretrained and frozen."""

from __future__ import annotations

from typing import Any

from torch import nn

from megabatch.errors import UsageError, plural
from megabatch.models.layers import Tower, tower_of, tower_parameters


def lock(
    module: nn.Module, tower: Tower, *, unlocked: int = 0, freeze_bn_stats: bool = False
) -> None:
    """Freeze a tower except for its last `unlocked` groups of layers.

    Args:
        module: of `Towers`.
        tower: "image" (the first) or "text".
        unlocked: counted by the model; in open_clip's transformers a group is a layer, and the
            projection is the last one.
        freeze_bn_stats: also freeze batch normalisation's running statistics; "image" only.

    Raises:
        UsageError: the model cannot lock this tower in this way.
    """
    model: Any = module
    option = f"--lock-{tower}"
    parameters = tower_parameters(module)[tower].values()
    try:
        if tower == "image":
            model.lock_image_tower(unlocked_groups=unlocked, freeze_bn_stats=freeze_bn_stats)
            if freeze_bn_stats:
                _freeze_left_out_statistics(module)
        else:
            model.lock_text_tower(unlocked_layers=unlocked)
    except Exception as error:  # whatever the architecture's own library raises
        raise UsageError(f"{option}: {error or type(error).__name__}") from error
    if all(parameter.requires_grad for parameter in parameters):
        raise UsageError(
            f"{option}: with {plural(unlocked, 'group')} unlocked nothing of the {tower} tower "
            "stays locked"
        )


def _freeze_left_out_statistics(module: nn.Module) -> None:
    """Freeze those of locked layers that open_clip 4 leaves out, such as a ResNet's first ones."""
    from open_clip.utils import freeze_batch_norm_2d

    for parent in [*module.modules()]:
        for name, layer in parent.named_children():
            if type(layer) is nn.BatchNorm2d and layer.affine and not layer.weight.requires_grad:
                setattr(parent, name, freeze_batch_norm_2d(layer))


def locked_towers(module: nn.Module) -> frozenset[Tower]:
    """The towers without trainable parameters, which run once per step."""
    towers = tower_parameters(module)
    return frozenset(
        tower
        for tower, parameters in towers.items()
        if not any(parameter.requires_grad for parameter in parameters.values())
    )


def set_modes(module: nn.Module) -> nn.Module:
    """Put a module in training mode, and its completely locked towers in evaluation mode.

    A locked tower's features then depend on the sample alone: there is no dropout or patch dropout,
    and batch normalisation does not use the micro-batch's statistics.
    """
    module.train()
    locked = locked_towers(module)
    for name, child in module.named_children():
        tower = tower_of(name)
        if tower in locked:
            child.eval()
    return module
