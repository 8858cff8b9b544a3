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

#: Prefixes of the first tower's parameters: in models of images, and in pairs of text encoders.
FIRST = ("visual.", "first.")
_SHARED = ("logit_scale", "logit_bias")
# A numbered layer, in the names of open_clip (layer1 is a ResNet's) and of transformers.
_NUMBERED = re.compile(r"(?:^|\.)(?:resblocks|blocks|layers?|block|h)\.?(\d+)\.")
# Parameters outside numbered layers that come before them; the others come after.
_BEFORE = re.compile(r"embed|conv1|conv2|conv3|bn[123]\b|ln_pre|norm_pre|pre_layrnorm|wte|wpe|cls")


def tower_parameters(module: nn.Module) -> dict[Tower, dict[str, nn.Parameter]]:
    """The parameters of each tower by name; scale and bias are in neither.

    If one encoder serves both sides, both have all of its parameters.
    """
    named = {n: p for n, p in module.named_parameters() if n not in _SHARED}
    image = {name: p for name, p in named.items() if name.startswith(FIRST)}
    text = {name: p for name, p in named.items() if name not in image}
    return {"image": image, "text": text or image}


def tower_of(name: str) -> Tower:
    """The tower that a submodule belongs to, by its name in the model."""
    return "image" if f"{name}.".startswith(FIRST) else "text"


def layer_ids(module: nn.Module) -> dict[str, tuple[int, int]]:
    """The layer of each parameter of a tower, and the tower's last layer.

    Layer 0 is everything before the first numbered layer (embeddings); the numbered ones follow;
    the last layer is everything after them (the final norm, the projection). For a timm trunk,
    timm's own numbers are used. A tower without numbered layers is not in the result.
    """
    found: dict[str, tuple[int, int]] = {}
    for parameters in tower_parameters(module).values():
        trunk = getattr(getattr(module, "visual", None), "trunk", None)
        if trunk is not None and any(n.startswith("visual.trunk.") for n in parameters):
            found |= _timm_ids(trunk, list(parameters))
        else:
            found |= _numbered_ids(list(parameters))
    return found


def lock_layers(module: nn.Module, prefix: str, unlocked: int) -> None:
    """Freeze the parameters with this prefix, except those of the last `unlocked` layers."""
    layers = {n: place for n, place in layer_ids(module).items() if n.startswith(prefix)}
    if unlocked and not layers:
        raise ValueError(
            f"this model's towers can only be locked as a whole, got {unlocked} unlocked"
        )
    for name, parameter in module.named_parameters():
        layer, last = layers.get(name, (0, 0))
        if name.startswith(prefix) and layer <= last - unlocked:
            parameter.requires_grad_(False)


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
    from torch import nn

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
