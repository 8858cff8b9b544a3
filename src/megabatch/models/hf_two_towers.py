"""Hugging Face models of images and texts, such as CLIP and SigLIP, from a folder."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megabatch.errors import UsageError, one_line
from megabatch.models.hf_folder import check_padding, read_model, read_tokenizer
from megabatch.models.images import multiply_patches, with_bytes
from megabatch.models.names import has_weights
from megabatch.models.padding import (
    Lengths,
    is_masked_kind,
    up_to_first,
    up_to_largest,
    without_padding,
)
from megabatch.models.towers import ModelOptions, Towers, TwoTowers, load

#: Model types whose features are the towers' pooled outputs, with a projection if there is one; and
#: whether padding is masked in the text tower. CLIP's text tower reads only up to the first end
#: token, and SigLIP's was trained with its padding.
KINDS = {"clip": False, "metaclip_2": False, "siglip": False, "vision-text-dual-encoder": True}

#: PIL's filters by number, those that open_clip's transforms support.
_FILTERS = {2: "bilinear", 3: "bicubic"}
_NEEDED = ("image_mean", "image_std", "resample")

_STEPS = ("do_resize", "do_rescale", "do_normalize")

#: Files of a folder's image processor: of older releases of transformers, and of newer ones.
PROCESSORS = ("preprocessor_config.json", "processor_config.json")


def create(
    name: str, folder: Path, config: Any, weights: Path | None, options: ModelOptions
) -> Towers:
    """Build a two-tower model; see `registry.create`, which reads the config.

    Images are preprocessed by open_clip's transforms, with the size, mean, standard deviation,
    filter and shape (centre crop, or squashed) of the folder's own image processor.
    """
    if config.model_type not in KINDS:
        raise UsageError(
            f"--model: {folder} is of type {config.model_type!r}, expected one of "
            f"{', '.join(KINDS)}, or a text encoder"
        )
    if given := options.given("hf_pooling", "hf_share"):
        raise UsageError(f"{', '.join(given)}: only for pairs of texts, but {name} takes images")
    if given := options.given("force_patch_dropout", "force_image_size"):
        raise UsageError(
            f"{', '.join(given)}: Hugging Face's {config.model_type} has no such option"
        )
    tokenizer = read_tokenizer(folder, config.text_config, options.force_context_length)
    pad = tokenizer.pad if KINDS[config.model_type] else None
    if pad is not None:
        check_padding(tokenizer)
    model = read_model(folder, config)
    _initialise_scale(model, options, fresh=not has_weights(folder))
    module = HuggingFaceTwoTowers(model, pad)
    if weights is not None:
        load(module, weights, name)
    projection = getattr(model, "visual_projection", None)
    width = config.vision_config.hidden_size if projection is None else projection.out_features
    multiply_patches(module.visual)
    train, evaluation = with_bytes(
        module.visual, *(_transform(folder, config.vision_config, one) for one in (True, False))
    )
    lengths = _lengths(config, pad)
    return Towers(
        name,
        module.train(),
        train,
        evaluation,
        tokenizer,
        int(width),
        lengths={} if lengths is None else {"text": lengths},
    )


def _lengths(config: Any, pad: int | None) -> Lengths | None:
    """The tokens that count for the text tower; None if it reads its padding, or may do so."""
    text = config.text_config
    if pad is not None:
        return functools.partial(without_padding, pad=pad) if is_masked_kind(text) else None
    if config.model_type == "siglip":
        return None
    if config.model_type == "clip" and text.eos_token_id == 2:  # of old folders, and not the end
        return up_to_largest
    return functools.partial(up_to_first, token=text.eos_token_id)


class ImageTower(nn.Module):
    """The parts of a model that compute an image's feature, under their names in that model."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.vision_model = model.vision_model
        self.visual_projection = getattr(model, "visual_projection", None)

    def forward(self, image: Tensor) -> Tensor:
        """Features (n, d), not normalised, of images (n, 3, size, size)."""
        pooled: Tensor = self.vision_model(pixel_values=image).pooler_output
        return pooled if self.visual_projection is None else self.visual_projection(pooled)


class TextTower(nn.Module):
    """The parts of a model that compute a text's feature, under their names in that model.

    pad: the padding token, which is masked; None: padding is not masked.
    """

    def __init__(self, model: Any, pad: int | None) -> None:
        super().__init__()
        self.text_model = model.text_model
        self.text_projection = getattr(model, "text_projection", None)
        self.pad = pad

    def forward(self, text: Tensor) -> Tensor:
        """Features (n, d), not normalised, of tokens, int64 (n, context_length)."""
        mask = None if self.pad is None else (text != self.pad).long()
        pooled: Tensor = self.text_model(input_ids=text, attention_mask=mask).pooler_output
        return pooled if self.text_projection is None else self.text_projection(pooled)


class HuggingFaceTwoTowers(TwoTowers):
    """A model's towers, scale and bias.

    The names of its weights without "visual." and "text." in front are transformers' own.
    """

    def __init__(self, model: Any, pad: int | None) -> None:
        super().__init__(ImageTower(model), TextTower(model, pad))
        self.logit_scale = model.logit_scale
        self.logit_bias = getattr(model, "logit_bias", None)


def _initialise_scale(model: Any, options: ModelOptions, fresh: bool) -> None:
    """Set scale and bias unless the folder's weights have them; add a bias if requested."""
    if fresh and options.init_logit_scale is not None:
        nn.init.constant_(model.logit_scale, options.init_logit_scale)
    if options.init_logit_bias is not None and (fresh or not hasattr(model, "logit_bias")):
        model.logit_bias = nn.Parameter(torch.full_like(model.logit_scale, options.init_logit_bias))


def _transform(folder: Path, vision: Any, train: bool) -> Any:
    from open_clip.transform import PreprocessCfg, image_transform_v2

    read = _processor(folder)
    try:
        filter_name = _FILTERS[read.get("resample", 3)]
        mean, std = tuple(read["image_mean"]), tuple(read["image_std"])
    except (KeyError, TypeError) as error:
        raise UsageError(
            f"--model: the image processor of {folder}: expected image_mean, image_std and "
            f"resample 2 or 3, got {', '.join(f'{k} {read.get(k)}' for k in _NEEDED)}"
        ) from error
    size = int(vision.image_size)
    _check_steps(read, size, folder)
    shape = "shortest" if read.get("do_center_crop") else "squash"
    config = PreprocessCfg(size, "RGB", mean, std, filter_name, shape)
    return image_transform_v2(config, is_train=train)


def _check_steps(read: dict[str, Any], size: int, folder: Path) -> None:
    """Raise a UsageError if a processor does anything that open_clip's transforms do not.

    They resize to the model's size, and crop to the same one.
    """
    got = {step: False for step in _STEPS if read.get(step) is False}
    sizes = ("size", "crop_size") if read.get("do_center_crop") else ("size",)
    for name in sizes:
        value = read.get(name, size)
        if set(value.values() if isinstance(value, dict) else [value]) != {size}:
            got[name] = value
    if got:
        raise UsageError(
            f"--model: the image processor of {folder}: expected {', '.join(_STEPS)} and the "
            f"model's {size} x {size} pixels, got {', '.join(f'{k} {v}' for k, v in got.items())}"
        )


def _processor(folder: Path) -> dict[str, Any]:
    """Read a folder's image processor; newer folders have it in the file of all processors."""
    path = next((folder / name for name in PROCESSORS if (folder / name).is_file()), None)
    if path is None:
        raise UsageError(f"--model: {folder} has no image processor: no {PROCESSORS[0]}")
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
        processor: dict[str, Any] = read.get("image_processor", read)
        processor.get("image_mean")
    except (OSError, ValueError, AttributeError) as error:
        raise UsageError(f"--model: {path} cannot be used: {one_line(error, 240)}") from error
    return processor
