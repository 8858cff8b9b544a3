"""Models by name, and those that a function of the user's own makes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megabatch.errors import UsageError
from megabatch.hints import is_reference
from megabatch.models import (
    glyph,
    hf_text_pair,
    hf_two_towers,
    names,
    openclip,
    own_code,
)
from megabatch.models import weights as files
from megabatch.models.hf_folder import read_config
from megabatch.models.towers import ModelOptions, Towers

#: Functions that a user's own towers and their module need.
_FUNCTIONS = ("train_transform", "eval_transform", "tokenizer")
_METHODS = ("encode_image", "encode_text")


def available() -> list[str]:
    """The names that `create` takes apart from folders: ours first, then open_clip's."""
    return [*names.OWN, *names.openclip_names()]


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
            run or one that open_clip publishes; a .pt file of OpenCLIP's trainer or of torch; or a
            folder that open_clip or a run wrote.
        options: changes to the model's own configuration.

    Raises:
        UsageError: there is no such model, it cannot be trained here or does not have these
            options, or its weights are missing, damaged or another model's.
    """
    options = options or ModelOptions()
    names.check(name, pretrained)
    file = None if pretrained is None else files.find(Path(pretrained))
    if name == glyph.NAME:
        return glyph.create(file, options)
    if is_reference(name):
        return _create_own(name, file, options)
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


def _create_own(name: str, weights: Path | None, options: ModelOptions) -> Towers:
    """Call the function and check its towers, whose name becomes the reference.

    Args:
        name: the reference. The function is called with `options` if it has such a parameter.
        weights: a file from `weights.find`, loaded into the module, or None.
        options: changes to the model; refused if the function does not take them.

    Raises:
        UsageError: there is no such function, it fails, it returns anything but usable `Towers`, or
            the weights are another model's.
    """
    label = f"--model {name}"
    function = own_code.load(name, "model")
    if "options" not in own_code.accepted(function, ("options",), label):
        given = options.given(*vars(options))
        if given:
            raise UsageError(
                f"{', '.join(given)}: {label} takes no options; expected a function with the "
                "parameter options (megabatch.models.ModelOptions)"
            )
    towers = own_code.call(function, label, options=options)
    if not isinstance(towers, Towers):
        raise UsageError(
            f"{label}: expected to return megabatch.models.Towers, got {own_code.describe(towers)}"
        )
    _check(towers, label)
    if weights is not None:
        files.fill(towers.module, files.load(weights), weights, name)
    towers.module.train()
    return replace(towers, name=name)


def _check(towers: Towers, label: str) -> None:
    """Raise a UsageError that names the part of the towers that cannot be used."""
    module, width = towers.module, towers.embed_dim
    if not isinstance(module, nn.Module):
        raise _wrong(label, "module", "a torch.nn.Module", module)
    scale = getattr(module, "logit_scale", None)
    if not isinstance(scale, nn.Parameter) or scale.numel() != 1:
        raise _wrong(label, "module.logit_scale", "a parameter with one element", scale)
    functions = {name: getattr(towers, name) for name in _FUNCTIONS}
    functions |= {f"module.{name}": getattr(module, name, None) for name in _METHODS}
    for name, value in functions.items():
        if not callable(value):
            raise _wrong(label, name, "a function", value)
    if not isinstance(width, int) or width < 1:
        raise _wrong(label, "embed_dim", "a whole number above 0", width)
    if towers.first not in ("image", "text"):
        raise _wrong(label, "first", "'image' or 'text'", towers.first)
    try:
        tokens = towers.tokenizer(["a", "b"])
    except Exception as error:
        raise own_code.failure(f"{label}: tokenizer", error) from error
    right = isinstance(tokens, Tensor) and tokens.dtype == torch.int64 and tokens.dim() == 2
    if not right or len(tokens) != 2:
        wanted = "int64 (n, context_length) for n texts"
        raise _wrong(label, "tokenizer", wanted, _kind(tokens))


def _kind(value: Any) -> Any:
    return (value.dtype, tuple(value.shape)) if isinstance(value, Tensor) else value


def _wrong(label: str, part: str, expected: str, value: object) -> UsageError:
    return UsageError(f"{label}: {part}: expected {expected}, got {own_code.describe(value)}")
