"""Hugging Face models of images and texts, such as CLIP and SigLIP, from a folder."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from megabatch.errors import UsageError, one_line
from megabatch.models.huggingface import read_model, read_tokenizer
from megabatch.models.images import multiply_patches, with_bytes
from megabatch.models.names import has_weights
from megabatch.models.padding import Lengths, up_to_first, up_to_largest
from megabatch.models.towers import ModelOptions, Towers, TwoTowers
from megabatch.models.weights import load_model

if TYPE_CHECKING:
    from open_clip.transform import PreprocessCfg

#: Model types whose features are the towers' pooled outputs, with a projection if there is one.
KINDS = ("clip", "metaclip_2", "siglip")

#: Files of a folder's image processor: of older releases of transformers, and of newer ones.
PROCESSORS = ("preprocessor_config.json", "processor_config.json")

#: PIL's filters by number, those that open_clip's transforms support.
_FILTERS = {2: "bilinear", 3: "bicubic"}
_STEPS = ("do_resize", "do_rescale", "do_normalize")


def create(
    name: str, folder: Path, config: Any, weights: Path | None, options: ModelOptions
) -> Towers:
    """Build a two-tower model; see `registry.create`, which reads the config.

    Images are preprocessed by open_clip's transforms, with the size, mean, standard deviation,
    filter and shape (centre crop, or squashed) of the folder's own image processor.
    """
    from open_clip.transform import image_transform_v2

    options.refuse(name, "hf_pooling", "hf_share", "force_patch_dropout", "force_image_size")
    text, kind = config.text_config, config.model_type
    if kind not in KINDS:
        raise UsageError(
            f"--model: {folder} is of type {kind!r}, expected one of {', '.join(KINDS)}, or a text "
            "encoder"
        )
    tokenizer = read_tokenizer(folder, text, options.force_context_length, masked=False)
    model = read_model(folder, config)
    visual = ImageTower(model)
    module = TwoTowers(visual, TextTower(model), options)
    _take_scale(module, model, None if has_weights(folder) else options)
    if weights is not None:
        load_model(module, weights, name)
    multiply_patches(visual)
    processor = _preprocessing(folder, int(config.vision_config.image_size))
    both = (image_transform_v2(processor, is_train=train) for train in (True, False))
    width = getattr(visual.visual_projection, "out_features", config.vision_config.hidden_size)
    return Towers(
        name,
        module.train(),
        *with_bytes(visual, *both),
        tokenizer,
        int(width),
        lengths={} if kind == "siglip" else {"text": _lengths(kind, text.eos_token_id)},
    )


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

    Padding is not masked: CLIP reads a text up to its end, and SigLIP is trained with padding.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.text_model = model.text_model
        self.text_projection = getattr(model, "text_projection", None)

    def forward(self, text: Tensor) -> Tensor:
        """Features (n, d), not normalised, of tokens, int64 (n, context_length)."""
        pooled: Tensor = self.text_model(input_ids=text).pooler_output
        return pooled if self.text_projection is None else self.text_projection(pooled)


def _take_scale(module: TwoTowers, model: Any, options: ModelOptions | None) -> None:
    """Use a model's own scale and bias, with the options' initial values if there are options."""
    for name in ("logit_scale", "logit_bias"):
        own, start = getattr(model, name, None), getattr(options, f"init_{name}", None)
        if own is not None and start is not None:
            nn.init.constant_(own, start)
        if own is not None:
            setattr(module, name, own)


def _lengths(kind: str, end: int) -> Lengths:
    if kind == "clip" and end == 2:  # of old folders, and not the end
        return up_to_largest
    return functools.partial(up_to_first, token=end)


def _preprocessing(folder: Path, size: int) -> PreprocessCfg:
    """open_clip's settings of the folder's image processor.

    Raises:
        UsageError: there is none, or it does anything that open_clip's transforms do not: they
            resize to the model's size, and crop to the same one.
    """
    from open_clip.transform import PreprocessCfg

    found = [folder / name for name in PROCESSORS if (folder / name).is_file()]
    path = next(iter(found), folder / PROCESSORS[0])
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
        read = read.get("image_processor", read)  # newer folders have it in a file of all
        crop = read.get("do_center_crop", False)
        wanted: dict[str, int] = {**dict.fromkeys(_STEPS, True), "size": size}
        wanted |= {"crop_size": size} if crop else {}
        if other := [f"{key} {read[key]}" for key in wanted if not _is(read, key, wanted[key])]:
            raise ValueError(f"got {', '.join(other)}")
        mean, std = tuple(read["image_mean"]), tuple(read["image_std"])
        filter_name = _FILTERS[read.get("resample", 3)]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"--model: {path} cannot be used: expected an image processor with {', '.join(_STEPS)} "
            f"to the model's {size} x {size} pixels, image_mean, image_std and resample 2 or 3: "
            f"{type(error).__name__}: {one_line(error, 240)}"
        ) from error
    return PreprocessCfg(size, "RGB", mean, std, filter_name, "shortest" if crop else "squash")


def _is(read: dict[str, Any], key: str, wanted: int) -> bool:
    """Whether a setting is as wanted, or not there; a size may have several sides."""
    value = read.get(key, wanted)
    return set(value.values() if isinstance(value, dict) else [value]) == {wanted}
