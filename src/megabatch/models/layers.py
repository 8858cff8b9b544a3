"""The tower of each parameter, and locked towers.

Locked towers (Zhai et al. 2022, "LiT", arXiv 2111.07991) are pretrained and frozen.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from megabatch.errors import UsageError, plural

if TYPE_CHECKING:
    from torch import nn

Tower = Literal["image", "text"]

_SHARED = ("logit_scale", "logit_bias")


def tower_of(name: str) -> Tower:
    """The tower that a parameter or submodule belongs to, by its name in the model."""
    return "image" if f"{name}.".startswith("visual.") else "text"


def tower_parameters(module: nn.Module) -> dict[Tower, dict[str, nn.Parameter]]:
    """The parameters of each tower by name; scale and bias are in neither.

    If one encoder serves both sides, both have all of its parameters.
    """
    found: dict[Tower, dict[str, nn.Parameter]] = {"image": {}, "text": {}}
    for name, parameter in module.named_parameters():
        if name not in _SHARED:
            found[tower_of(name)][name] = parameter
    return {**found, "text": found["text"] or found["image"]}


def lock(module: nn.Module, tower: Tower, *, unlocked: int = 0) -> None:
    """Freeze a tower, as open_clip does if the model is its own.

    Args:
        module: of `Towers`.
        tower: "image" (the first) or "text".
        unlocked: the last groups of layers that stay trainable, for open_clip's models, which count
            them: in transformers a group is a layer, and the projection is the last one.

    Raises:
        UsageError: the model cannot lock this tower in this way.
    """
    option, towers = f"--lock-{tower}", tower_parameters(module)
    if not towers["image"]:
        raise UsageError(f"{option}: expected a model whose first tower is its submodule `visual`")
    if towers["image"].keys() == towers["text"].keys():
        raise UsageError(f"{option}: one encoder serves both sides; expected two (--no-hf-share)")
    parameters = towers[tower].values()
    own = getattr(module, f"lock_{tower}_tower", None)
    if own is not None:
        try:
            own(unlocked)
        except Exception as error:  # whatever the architecture's own library raises
            raise UsageError(f"{option}: {error or type(error).__name__}") from error
    elif unlocked:
        raise UsageError(f"{option}: this model's towers are locked as a whole, got {unlocked}")
    else:
        for parameter in parameters:
            parameter.requires_grad_(False)
    if all(parameter.requires_grad for parameter in parameters):
        raise UsageError(
            f"{option}: with {plural(unlocked, 'group')} unlocked nothing of the {tower} tower "
            "stays locked"
        )


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
        if tower_of(name) in locked:
            child.eval()
    return module
