"""What every model is to the rest of the library."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn


@dataclass
class Towers:
    """A two-tower model with all that its inputs need.

    name: what `megabatch.models.create` calls it.
    module: `module(image, text)` gives a dict with `image_features` and `text_features`, both
        (n, embed_dim) and L2-normalised; `logit_scale`, exponentiated, shape () or (1,); and, where
        the model has one, `logit_bias`. An input that is None has features None. It has
        `encode_image(images, normalize=False)`, `encode_text(texts, normalize=False)` and the
        parameter `logit_scale` (a logarithm), as open_clip's models do.
    train_transform, eval_transform: one picture (or first text) to one tensor of what
        `encode_image` takes; picklable. The first may be random and then draws from torch's global
        generator.
    tokenizer: texts to int64 (n, context_length).
    embed_dim: width of the features.
    first: what the first of a pair is; a model of text pairs takes it as "image" all the same.
    """

    name: str
    module: nn.Module
    train_transform: Callable[[Any], torch.Tensor]
    eval_transform: Callable[[Any], torch.Tensor]
    tokenizer: Callable[[Any], torch.Tensor]
    embed_dim: int
    first: Literal["image", "text"] = "image"


def outputs(module: Any, image: Tensor | None, text: Tensor | None) -> dict[str, Tensor | None]:
    """What `Towers.module` gives, by its own encoders."""
    found = {
        "image_features": None if image is None else module.encode_image(image, normalize=True),
        "text_features": None if text is None else module.encode_text(text, normalize=True),
        "logit_scale": module.logit_scale.exp(),
    }
    bias = module.logit_bias
    return found if bias is None else {**found, "logit_bias": bias}
