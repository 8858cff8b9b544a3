"""The tower and the layer of each parameter, and locked towers.

Locked towers (Zhai et al. 2022, "LiT", arXiv 2111.07991) are pretrained and frozen.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Literal

from megabatch.errors import UsageError, plural

if TYPE_CHECKING:
    from torch import nn

Tower = Literal["image", "text"]

_SHARED = ("logit_scale", "logit_bias")
# A numbered layer, in the names of open_clip (layer1 is a ResNet's) and of transformers.
_NUMBERED = re.compile(r"(?:^|\.)(?:resblocks|blocks|layers?|block|h)\.?(\d+)\.")
# Parameters outside numbered layers that come before them; the others come after.
_BEFORE = re.compile(r"embed|conv1|conv2|conv3|bn[123]\b|ln_pre|norm_pre|pre_layrnorm|wte|wpe|cls")


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


def layer_ids(module: nn.Module) -> dict[str, tuple[int, int]]:
    """The layer of each parameter of a tower, and the tower's last layer.

    Layer 0 is everything before the first numbered layer (embeddings); the numbered ones follow;
    the last layer is everything after them (the final norm, the projection). For a timm trunk,
    timm's own numbers are used. A tower without numbered layers is not in the result.
    """
    found: dict[str, tuple[int, int]] = {}
    trunk = getattr(getattr(module, "visual", None), "trunk", None)
    for tower, parameters in tower_parameters(module).items():
        timms = tower == "image" and trunk is not None
        found |= _timm_ids(trunk, [*parameters]) if timms else _numbered_ids([*parameters])
    return found


def _numbered_ids(names: list[str]) -> dict[str, tuple[int, int]]:
    numbers = {name: int(m.group(1)) for name in names if (m := _NUMBERED.search(name))}
    if not numbers:
        return {}
    # Layers are numbered from 1 in open_clip's ResNets, from 0 in all others.
    first, last = min(numbers.values()), max(numbers.values())
    after = last - first + 2
    found = {}
    for name in names:
        if name in numbers:
            found[name] = (numbers[name] - first + 1, after)
        else:
            # A pooling layer has embeddings, too.
            before = _BEFORE.search(name) and "pool" not in name
            found[name] = (0 if before else after, after)
    return found


def _timm_ids(trunk: Any, names: list[str]) -> dict[str, tuple[int, int]]:
    from timm.models import group_parameters

    ids = group_parameters(trunk, trunk.group_matcher(coarse=False), reverse=True)
    inside = {name: ids.get(name.removeprefix("visual.trunk.")) for name in names}
    last = max(ids.values()) + (None in inside.values())  # open_clip's own projection
    return {name: (last if layer is None else layer, last) for name, layer in inside.items()}


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
