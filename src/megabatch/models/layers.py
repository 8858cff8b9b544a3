"""The tower and the layer of each parameter."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Literal

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
    for name, (layer, last) in layer_ids(module).items():
        if name.startswith(prefix) and layer <= last - unlocked:
            module.get_parameter(name).requires_grad_(False)


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
