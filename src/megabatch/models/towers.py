"""The interface of a model to the rest of the library, and a module of two towers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megabatch.errors import UsageError
from megabatch.hints import option
from megabatch.losses.registry import TRAINABLE
from megabatch.models.layers import Tower
from megabatch.models.padding import Lengths, Pooling


@dataclass(frozen=True)
class ModelOptions:
    """Changes to a model's own configuration; None leaves it unchanged.

    Args:
        force_patch_dropout: fraction of the image's patches dropped in training, at least 0 and
            below 1 (Li et al. 2022, FLIP, arXiv 2212.00794).
        force_image_size: pixels per side; positional embeddings of loaded weights are resized.
        force_context_length: tokens per text, likewise.
        init_logit_scale: initial logarithm of the logit scale.
        init_logit_bias: initial logit bias; a model without one gets one. Both only apply if loaded
            weights have no value.
        hf_pooling: for pairs of texts, the feature of a text: the mean over its tokens, the first
            token or the last one. Default: as the folder says if sentence-transformers saved it,
            else the mean.
        hf_share: for pairs of texts, one encoder for both; otherwise two, with equal initial
            weights.
    """

    force_patch_dropout: float | None = None
    force_image_size: int | None = None
    force_context_length: int | None = None
    init_logit_scale: float | None = None
    init_logit_bias: float | None = None
    hf_pooling: Pooling | None = None
    hf_share: bool = True

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> ModelOptions:
        """Extract the options from a run's settings, such as its config.toml.

        With `loss` among the settings, scale and bias start where that loss wants them unless they
        are set: those of "siglip" at 10 and -10, as in the paper (Zhai et al. 2023, arXiv
        2303.15343) and OpenCLIP.
        """
        names = [field.name for field in fields(cls)]
        chosen = {name: settings[name] for name in names if settings.get(name) is not None}
        if loss := TRAINABLE.get(settings.get("loss", "")):
            starts = {"init_logit_scale": loss.initial_scale, "init_logit_bias": loss.initial_bias}
            chosen = {k: value for k, value in starts.items() if value is not None} | chosen
        for name in chosen.keys() & {"init_logit_scale", "init_logit_bias"}:
            chosen[name] = float(chosen[name])  # of a whole number torch makes no parameter
        return cls(**chosen)

    def refuse(self, model: str, *names: str) -> None:
        """Raise a UsageError if any of these options, which the model does not have, is given."""
        default = ModelOptions()
        given = [option(name) for name in names if getattr(self, name) != getattr(default, name)]
        if given:
            raise UsageError(f"{', '.join(given)}: {model} has no such option")


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


class TwoTowers(nn.Module):
    """Two towers with the interface of `Towers.module`.

    Args:
        visual: images, or first texts, to features (n, d), not normalised.
        text: tokens to features (n, d), not normalised. None: `visual` encodes both texts.
        options: initial scale and bias; default: no bias.
        scale: the default of the initial scale, before its logarithm; open_clip's.
    """

    def __init__(
        self,
        visual: nn.Module,
        text: nn.Module | None,
        options: ModelOptions | None = None,
        *,
        scale: float = 1 / 0.07,
    ) -> None:
        super().__init__()
        options = options or ModelOptions()
        start, bias = options.init_logit_scale, options.init_logit_bias
        self.visual, self.text = visual, text
        self.logit_scale = nn.Parameter(torch.tensor(math.log(scale) if start is None else start))
        self.logit_bias: nn.Parameter | None
        self.register_parameter(
            "logit_bias", None if bias is None else nn.Parameter(torch.tensor(bias))
        )

    def encode_image(self, image: Tensor, normalize: bool = False) -> Tensor:
        """Features (n, d) of transformed images."""
        features = self.visual(image)
        return F.normalize(features, dim=-1) if normalize else features

    def encode_text(self, text: Tensor, normalize: bool = False) -> Tensor:
        """Features (n, d) of tokens, int64 (n, context_length)."""
        features = (self.visual if self.text is None else self.text)(text)
        return F.normalize(features, dim=-1) if normalize else features

    def forward(
        self, image: Tensor | None = None, text: Tensor | None = None
    ) -> dict[str, Tensor | None]:
        """Normalised features of both, and the scale; see `Towers`."""
        found = {
            "image_features": None if image is None else self.encode_image(image, normalize=True),
            "text_features": None if text is None else self.encode_text(text, normalize=True),
            "logit_scale": self.logit_scale.exp(),
        }
        bias = self.logit_bias
        return found if bias is None else {**found, "logit_bias": bias}
