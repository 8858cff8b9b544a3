"""Models by name."""

from __future__ import annotations

import difflib
from pathlib import Path

from megabatch.errors import UsageError
from megabatch.models import glyph, huggingface, icon, openclip, weights
from megabatch.models.options import ModelOptions
from megabatch.models.towers import Towers

_OWN = {glyph.NAME: glyph.create, icon.NAME: icon.create}


def available() -> list[str]:
    """The names that `create` takes beside those of folders: ours first, then open_clip's."""
    return [*_OWN, *openclip.names()]


def create(
    name: str, *, pretrained: str | Path | None = None, options: ModelOptions | None = None
) -> Towers:
    """Build a model in float32 on the CPU, in training mode.

    Weights come from torch's global generator, so seed it first for a repeatable start. None are
    ever downloaded, and no code out of a pickle is run. Where an architecture's tokenizer or text
    tower is Hugging Face's, its library looks for their configuration in the local cache and then
    online, unless HF_HUB_OFFLINE=1 is set.

    Args:
        name: one of `available()`; "local-dir:PATH", a folder that open_clip saved for the hub
            (open_clip_config.json and weights); or "hf:PATH", a folder that transformers saved: a
            model of images and texts with tokenizer and image processor, or a text encoder and its
            tokenizer, for pairs of texts.
        pretrained: the model's weights: a .safetensors file such as the `model.safetensors` of a
            run or what open_clip publishes; a .pt file of OpenCLIP's trainer or of torch; or a
            folder that open_clip or a run wrote.
        options: changes to the model's own configuration.

    Raises:
        UsageError: no such model, a model that cannot be trained here, options that it does not
            have, or weights that are missing, damaged or another model's.
    """
    options = options or ModelOptions()
    file = None if pretrained is None else weights.find(Path(pretrained))
    if name in _OWN:
        return _OWN[name](file, options)
    if name.startswith(huggingface.PREFIX):
        return huggingface.create(name, file, options)
    if not name.startswith(openclip.FOLDER) and name not in openclip.names():
        raise UsageError(f"--model: {name!r} is not known{_suggestion(name)}")
    return openclip.create(name, file, options)


def _suggestion(name: str) -> str:
    lower = {known.lower(): known for known in available()}
    close = difflib.get_close_matches(name.lower(), lower, n=3, cutoff=0.5)
    if not close:
        return "; python -c 'import megabatch.models as m; print(*m.available())' lists all"
    return f"; did you mean {' or '.join(lower[match] for match in close)}?"
