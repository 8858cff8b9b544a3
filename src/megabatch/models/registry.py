"""Models by name, and those that a function of the user's own makes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from torch import nn

from megabatch.errors import UsageError
from megabatch.models import names, own_code, weights
from megabatch.models.towers import ModelOptions, Towers
from megabatch.options import is_reference


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
            "module:function", a function whose code is run and that returns `Towers`.
        pretrained: the model's weights: a .safetensors file such as the `model.safetensors` of a
            run or one that open_clip publishes; a file of OpenCLIP's trainer or of torch; or a
            run's folder.
        options: changes to the model's own configuration.

    Raises:
        UsageError: there is no such model, it cannot be trained here or does not have these
            options, or its weights are missing, damaged or another model's.
    """
    options = options or ModelOptions()
    names.check(name)
    file = None if pretrained is None else weights.find(Path(pretrained))
    if is_reference(name):
        return _create_own(name, file, options)
    # Each kind imports its own libraries, which take seconds.
    if name == names.GLYPH:
        from megabatch.models import glyph

        return glyph.create(file, options)
    if name.startswith(names.HUGGING_FACE):
        from megabatch.models import hf_images, huggingface

        folder = Path(name.removeprefix(names.HUGGING_FACE))
        config = huggingface.read_config(folder)
        has_images = hasattr(config, "vision_config") and hasattr(config, "text_config")
        module = hf_images if has_images else huggingface
        return module.create(name, folder, config, file, options)
    from megabatch.models import openclip

    return openclip.create(name, file, options)


def _create_own(name: str, file: Path | None, options: ModelOptions) -> Towers:
    """Call the function that a reference names, with `options` if it has such a parameter.

    Raises:
        UsageError: there is no such function, it fails, it returns anything but usable `Towers`, or
            the weights are another model's.
    """
    label = f"--model {name}"
    function = own_code.load(name, "model")
    if "options" not in own_code.accepted(function, ("options",), label):
        options.refuse(f"{label}, a function without the parameter options,", *vars(options))
    towers = own_code.call(function, label, options=options)
    if not isinstance(towers, Towers):
        got = type(towers).__name__
        raise UsageError(f"{label}: expected to return megabatch.models.Towers, got {got}")
    scale = getattr(towers.module, "logit_scale", None)
    if not isinstance(scale, nn.Parameter) or scale.numel() != 1:
        raise UsageError(f"{label}: module.logit_scale: expected a parameter with one element")
    if file is not None:
        weights.load_model(towers.module, file, name)
    towers.module.train()
    return replace(towers, name=name)
