"""The interface of a model to the rest of the library."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from megabatch.models.layers import Tower
from megabatch.models.padding import Lengths


@dataclass
class Towers:
    """A two-tower model with the transforms and tokenizer of its inputs.

    Args:
        name: the model's name for `megabatch.models.create`.
        module: `module(image, text)` returns a dict with `image_features` and `text_features`, both
            (n, embed_dim) and L2-normalised; `logit_scale`, exponentiated, shape () or (1,); and,
            if the model has one, `logit_bias`. An input that is None gives features that are None.
            It has `encode_image(images, normalize=False)`, `encode_text(texts, normalize=False)`
            and the parameter `logit_scale` (a logarithm), like open_clip's models.
        train_transform, eval_transform: one image (or first text) to one tensor for `encode_image`;
            picklable. The first may be random, with torch's global generator.
        tokenizer: texts to int64 (n, context_length).
        embed_dim: width of the features.
        first: kind of a pair's first element; a model of text pairs also takes it as `image`.
        lengths: for each text tower that takes texts without their padding, the function that tells
            how many tokens a text's features depend on (`megabatch.models.padding`); other towers
            take whole texts only.
    """

    name: str
    module: nn.Module
    train_transform: Callable[[Any], torch.Tensor]
    eval_transform: Callable[[Any], torch.Tensor]
    tokenizer: Callable[[Any], torch.Tensor]
    embed_dim: int
    first: Literal["image", "text"] = "image"
    lengths: Mapping[Tower, Lengths] = field(default_factory=dict)


def outputs(module: Any, image: Tensor | None, text: Tensor | None) -> dict[str, Tensor | None]:
    """Compute the output of `Towers.module` with its own encoders."""
    found = {
        "image_features": None if image is None else module.encode_image(image, normalize=True),
        "text_features": None if text is None else module.encode_text(text, normalize=True),
        "logit_scale": module.logit_scale.exp(),
    }
    bias = module.logit_bias
    return found if bias is None else {**found, "logit_bias": bias}
