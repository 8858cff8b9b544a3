"""Hugging Face models of images and texts, such as CLIP and SigLIP, from a folder."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from open_clip.transform import PreprocessCfg, image_transform_v2
from PIL import Image
from torch import Tensor, nn

from megabatch.errors import UsageError
from megabatch.models.huggingface import READING, read_model, read_tokenizer
from megabatch.models.images import Transform, multiply_patches, with_bytes
from megabatch.models.names import has_weights
from megabatch.models.padding import Lengths, up_to_first, up_to_largest
from megabatch.models.towers import OF_IMAGES, ModelOptions, Towers, TwoTowers

#: Model types whose features are the towers' pooled outputs, with a projection if there is one.
KINDS = ("clip", "metaclip_2", "siglip")

#: Files of a folder's image processor: of older releases of transformers, and of newer ones.
PROCESSORS = ("preprocessor_config.json", "processor_config.json")

#: PIL's filters by number, those that open_clip's transforms support.
_FILTERS = {2: "bilinear", 3: "bicubic"}
#: Smooth, and on its edges a processor with other crops or sizes gives other values.
_SAMPLE = Image.linear_gradient("L").resize((300, 200)).convert("RGB")
_TOLERANCE = 0.1  # of two libraries' filters, in standard deviations


def create(name: str, folder: Path, config: Any, options: ModelOptions) -> Towers:
    """Build a two-tower model; see `registry.create`, which reads the config.

    Images are preprocessed by open_clip's transforms, with the size, mean, standard deviation,
    filter and shape (centre crop, or squashed) of the folder's own image processor.
    """
    options.refuse(name, "hf_pooling", "hf_share", *OF_IMAGES)
    text, kind = config.text_config, config.model_type
    if kind not in KINDS:
        raise UsageError(
            f"--model: {folder} is of type {kind!r}, expected one of {', '.join(KINDS)}, or a text "
            "encoder"
        )
    tokenizer = read_tokenizer(folder, text, options.force_context_length, masked=False)
    model = read_model(folder, config)
    visual = PooledTower(model, "vision_model", "visual_projection")
    module = TwoTowers(visual, PooledTower(model, "text_model", "text_projection"), options)
    _take_scale(module, model, None if has_weights(folder) else options)
    multiply_patches(visual)
    transforms = _transforms(folder, int(config.vision_config.image_size))
    width = getattr(visual.visual_projection, "out_features", config.vision_config.hidden_size)
    return Towers(
        name,
        module,
        *with_bytes(visual, *transforms),
        tokenizer,
        int(width),
        lengths={} if kind == "siglip" else {"text": _lengths(kind, text.eos_token_id)},
    )


class PooledTower(nn.Module):
    """The parts of a model that compute a feature, under their names in that model.

    Padding of texts is not masked: CLIP reads a text up to its end, and SigLIP is trained with it.

    encoder, projection: their names; a model may have no projection.
    """

    def __init__(self, model: Any, encoder: str, projection: str) -> None:
        super().__init__()
        self.names = encoder, projection
        for name in self.names:
            self.add_module(name, getattr(model, name, None))

    def forward(self, inputs: Tensor) -> Tensor:
        """Features (n, d), not normalised.

        Args:
            inputs: images (n, 3, size, size), or tokens, int64 (n, context_length).
        """
        encoder, projection = (getattr(self, name) for name in self.names)
        pooled: Tensor = encoder(inputs).pooler_output
        return pooled if projection is None else projection(pooled)


def _take_scale(module: TwoTowers, model: Any, options: ModelOptions | None) -> None:
    """Use a model's own scale and bias, with the options' initial values if there are options."""
    for name in ("logit_scale", "logit_bias"):
        own, start = getattr(model, name, None), getattr(options, f"init_{name}", None)
        if own is not None:
            setattr(module, name, own if start is None else nn.init.constant_(own, start))


def _lengths(kind: str, end: int) -> Lengths:
    if kind == "clip" and end == 2:  # of old folders, and not the end
        return up_to_largest
    return functools.partial(up_to_first, token=end)


def _transforms(folder: Path, size: int) -> list[Transform]:
    """open_clip's transforms for training and evaluation, with the folder's own settings.

    Raises:
        UsageError: the folder's image processor does anything that these do not: they resize to
            the model's size, and crop to the same one.
    """
    from transformers import AutoImageProcessor

    own = AutoImageProcessor.from_pretrained(folder, **READING)
    shape: Any = "shortest" if getattr(own, "do_center_crop", False) else "squash"
    pixels = (*own.image_mean,), (*own.image_std,)
    resize = _FILTERS.get(own.resample, "bicubic")
    config = PreprocessCfg(size, "RGB", *pixels, resize, shape)
    expected = torch.as_tensor(own(_SAMPLE, return_tensors="pt")["pixel_values"][0])
    train, evaluation = (image_transform_v2(config, is_train=one) for one in (True, False))
    found = evaluation(_SAMPLE)
    same = found.shape == expected.shape and (found - expected).abs().max() < _TOLERANCE
    if not same or own.resample not in _FILTERS:
        raise UsageError(
            f"--model: the image processor of {folder} does not only resize to {size} x {size} "
            "pixels, by a bilinear or bicubic filter, rescale and normalise"
        )
    return [train, evaluation]
