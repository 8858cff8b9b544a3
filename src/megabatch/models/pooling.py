"""One feature per text from a transformer's last hidden states."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch import Tensor

Pooling = Literal["mean", "cls", "last"]

#: The names of these in sentence-transformers' files, of older releases and of newer ones.
_SAVED = {"mean_tokens": "mean", "cls_token": "cls", "lasttoken": "last"}


def pool(states: Tensor, mask: Tensor, pooling: Pooling) -> Tensor:
    """Features (n, d): the mean over a text's tokens, its first token's or its last one's.

    Args:
        states: (n, length, d).
        mask: (n, length), of any dtype; 0 marks padding, which may be on either side.
        pooling: which of the three.
    """
    import torch  # which `saved_pooling` does without

    if pooling != "mean":
        rows, positions = (torch.arange(n, device=states.device) for n in states.shape[:2])
        if pooling == "cls":
            return states[rows, mask.bool().int().argmax(dim=1)]
        return states[rows, torch.where(mask.bool(), positions, 0).amax(dim=1)]
    weight = mask.unsqueeze(-1).to(states.dtype)
    return (states * weight).sum(1) / weight.sum(1).clamp(min=1)


def saved_pooling(folder: Path) -> str:
    """The pooling in a folder that sentence-transformers saved, such as "cls"; "" in another one.

    Further modules that change pooled features are part of it, as in "cls and Dense".
    """
    found: list[str] = []
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        for module in _read(folder / "modules.json"):
            kind = str(module["type"]).rsplit(".", 1)[-1]
            if kind == "Pooling":
                found += _modes(_read(folder / module["path"] / "config.json"))
            elif found and kind != "Normalize":
                found.append(kind)
    return " and ".join(found)


def _modes(config: dict[str, Any]) -> list[str]:
    prefix = "pooling_mode_"
    modes = config.get("pooling_mode") or [
        name.removeprefix(prefix)
        for name, on in config.items()
        if name.startswith(prefix) and on is True
    ]
    return [_SAVED.get(mode, mode) for mode in ([modes] if isinstance(modes, str) else modes)]


def _read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))
