"""Models by name."""

from __future__ import annotations

import difflib
from pathlib import Path

from safetensors import SafetensorError, safe_open

from megabatch.errors import UsageError
from megabatch.models import glyph, openclip
from megabatch.models.towers import Towers


def available() -> list[str]:
    """The names that `create` takes: ours first, then open_clip's."""
    return [glyph.NAME, *openclip.names()]


def create(name: str, *, pretrained: str | Path | None = None) -> Towers:
    """Build a model in float32 on the CPU, in training mode.

    Weights come from torch's global generator, so seed it first for a repeatable start.

    Args:
        name: one of `available()`.
        pretrained: a local .safetensors file with the model's weights, such as the
            `model.safetensors` of a run or what open_clip publishes. Nothing is downloaded, and no
            other format is read, since a pickle can run code.

    Raises:
        UsageError: no such model, a model that cannot be trained here, or weights that are
            missing, damaged or another model's.
    """
    if name != glyph.NAME and name not in openclip.names():
        raise UsageError(f"model: {name!r} is not known{_suggestion(name)}")
    weights = None if pretrained is None else _check_weights(Path(pretrained))
    if name == glyph.NAME:
        return glyph.create(weights)
    return openclip.create(name, weights)


def _suggestion(name: str) -> str:
    lower = {known.lower(): known for known in available()}
    close = difflib.get_close_matches(name.lower(), lower, n=3, cutoff=0.5)
    if not close:
        return "; megabatch.models.available() lists all"
    return f"; did you mean {' or '.join(lower[match] for match in close)}?"


def _check_weights(path: Path) -> Path:
    if path.suffix != ".safetensors":
        raise UsageError(
            f"pretrained: expected a local .safetensors file, got {str(path)!r} "
            "(nothing is downloaded and no pickle is loaded)"
        )
    if not path.is_file():
        raise UsageError(f"pretrained: there is no file {path}")
    try:
        with safe_open(path, framework="pt"):
            return path
    except (SafetensorError, OSError) as error:
        raise UsageError(f"pretrained: {path} is damaged: {error}") from error
