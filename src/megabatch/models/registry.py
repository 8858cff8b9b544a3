"""Models by name."""

from __future__ import annotations

from pathlib import Path

from megabatch.hints import is_reference
from megabatch.models import (
    glyph,
    hf_text_pair,
    hf_two_towers,
    icon,
    names,
    openclip,
    own,
    weights,
)
from megabatch.models.hf_folder import read_config
from megabatch.models.options import ModelOptions
from megabatch.models.towers import Towers

_OWN = {glyph.NAME: glyph.create, icon.NAME: icon.create}


def available() -> list[str]:
    """The names that `create` takes apart from folders: ours first, then open_clip's."""
    return [*_OWN, *names.openclip_names()]


def create(
    name: str, *, pretrained: str | Path | None = None, options: ModelOptions | None = None
) -> Towers:
    """Build a model in float32 on the CPU, in training mode.

    Random weights come from torch's global generator, so seed it first for a reproducible start.
    Weights are never downloaded, and no code from a pickle is run. If an architecture's tokenizer
    or text tower is Hugging Face's, its library looks for their configuration in the local cache
    and then online, unless HF_HUB_OFFLINE=1 is set.

    Args:
        name: one of `available()`; "local-dir:PATH", a folder that open_clip saved for the hub
            (open_clip_config.json and weights); or "hf:PATH", a folder that transformers saved: a
            model of images and texts with tokenizer and image processor, or a text encoder and its
            tokenizer, for pairs of texts. Without weights in the folder they are random. Or
            "module:function", whose code is run, a function that returns `Towers`: see `own.create`
        pretrained: the model's weights: a .safetensors file such as the `model.safetensors` of a
            run or one that open_clip publishes; a .pt file of OpenCLIP's trainer or of torch; or a
            folder that open_clip or a run wrote.
        options: changes to the model's own configuration.

    Raises:
        UsageError: there is no such model, it cannot be trained here or does not have these
            options, or its weights are missing, damaged or another model's.
    """
    options = options or ModelOptions()
    names.check(name, pretrained)
    file = None if pretrained is None else weights.find(Path(pretrained))
    if name in _OWN:
        return _OWN[name](file, options)
    if is_reference(name):
        return own.create(name, file, options)
    if name.startswith(names.HUGGING_FACE):
        return _create_hugging_face(name, file, options)
    return openclip.create(name, file, options)


def _create_hugging_face(name: str, file: Path | None, options: ModelOptions) -> Towers:
    """A two-tower model of images and texts if the folder has one, else a pair of text encoders."""
    folder = Path(name.removeprefix(names.HUGGING_FACE))
    config = read_config(folder)
    has_images = hasattr(config, "vision_config") and hasattr(config, "text_config")
    kind = hf_two_towers if has_images else hf_text_pair
    return kind.create(name, folder, config, file, options)
