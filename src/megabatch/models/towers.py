"""What every model is to the rest of the library."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image
from torch import nn


@dataclass
class Towers:
    """A two-tower model with all that its inputs need.

    name: what `megabatch.models.create` calls it.
    module: `module(image, text)` gives a dict with `image_features` and `text_features`, both
        (n, embed_dim) and L2-normalised, and `logit_scale`, exponentiated, shape () or (1,). It
        has `encode_image(images, normalize=False)`, `encode_text(texts, normalize=False)` and the
        parameter `logit_scale` (a logarithm), as open_clip's models do.
    train_transform, eval_transform: one picture to one tensor of what `encode_image` takes;
        picklable. The first may be random and then draws from torch's global generator.
    tokenizer: texts to int64 (n, context_length).
    embed_dim: width of the features.
    """

    name: str
    module: nn.Module
    train_transform: Callable[[Image.Image], torch.Tensor]
    eval_transform: Callable[[Image.Image], torch.Tensor]
    tokenizer: Callable[[Any], torch.Tensor]
    embed_dim: int
