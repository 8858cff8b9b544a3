"""Weights of one tower alone, as a locked image tower under a new text tower has them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from torch import Tensor, nn

from megabatch.errors import UsageError
from megabatch.models import weights
from megabatch.models.layers import FIRST, Tower

# What a file's names may lack, or have beside, those of the whole model: a whole model's file; a
# tower's own; a timm trunk's; a text tower as a part of the model or unpacked into it.
_PREFIXES = {"image": ("", "visual.", "visual.trunk.", "first."), "text": ("", "text.", "second.")}


def load_tower(module: nn.Module, tower: Tower, path: Path) -> None:
    """Load one tower's weights; everything else in the file is passed over.

    Args:
        module: of `Towers`.
        tower: which one; "image" is the first.
        path: what `create` takes as `pretrained`: a file of a whole model, of the tower alone, or
            of a timm trunk, whose projection then stays as it is.

    Raises:
        UsageError: the file lacks some of the tower's tensors, or has them in other sizes.
    """
    from open_clip.model import resize_pos_embed, resize_text_pos_embed

    option = f"--pretrained-{tower}-path"
    stored = weights.load(weights.find(path))
    wanted = {name for name in module.state_dict() if _is_of(name, tower)}
    missing: set[str] = wanted
    for state, needed in _readings(stored, wanted, tower):
        lacking = needed - state.keys()
        if needed and not lacking:
            found = {name: state[name] for name in needed}
            try:
                resize_pos_embed(found, module)  # both do nothing for other models' names
                resize_text_pos_embed(found, module)
                module.load_state_dict(found, strict=False)
            except Exception as error:  # other sizes; open_clip's resizing has its own kinds
                reason = " ".join(str(error).split())
                raise UsageError(f"{option}: {path} is of another tower: {reason}") from error
            return
        missing = min(missing, lacking or missing, key=len)
    raise UsageError(
        f"{option}: {path} lacks {len(missing)} of the {len(wanted)} tensors of the {tower} tower, "
        f"such as {min(missing)}"
    )


def _readings(
    stored: dict[str, Tensor], wanted: set[str], tower: Tower
) -> Iterator[tuple[dict[str, Tensor], set[str]]]:
    """The file's tensors under the model's names, and which of those it should have."""
    for prefix in _PREFIXES[tower]:
        needed = {name for name in wanted if name.startswith(prefix)}
        yield {prefix + name: value for name, value in stored.items()}, needed
    yield {name.removeprefix("text."): value for name, value in stored.items()}, wanted


def _is_of(name: str, tower: Tower) -> bool:
    if name in ("logit_scale", "logit_bias"):
        return False
    return name.startswith(FIRST) == (tower == "image")
