"""What can be changed about a model when it is built."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from megabatch.hints import option
from megabatch.losses.registry import TRAINABLE

Pooling = Literal["mean", "cls", "last"]


@dataclass(frozen=True)
class ModelOptions:
    """Changes to a model's own configuration; None leaves what it has.

    force_patch_dropout: share of the image's patches left out in training, from 0 to below 1 (Li et
        al. 2022, FLIP, arXiv 2212.00794).
    force_image_size: pixels a side; positional embeddings of weights that are loaded are resized.
    force_context_length: tokens a text, likewise.
    init_logit_scale: where the logarithm of the logit scale starts.
    init_logit_bias: where the logit bias starts; a model that has none gets one.
        Both are starts: a value in weights that are loaded wins.
    hf_pooling: of "hf:" models, what a text's feature is: the mean over its tokens, its first token
        or its last one.
    hf_share: of "hf:" models, one encoder for both texts; otherwise two that start alike.
    """

    force_patch_dropout: float | None = None
    force_image_size: int | None = None
    force_context_length: int | None = None
    init_logit_scale: float | None = None
    init_logit_bias: float | None = None
    hf_pooling: Pooling = "mean"
    hf_share: bool = True

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> ModelOptions:
        """The options among a run's settings (its config.toml, say); other settings are passed by.

        With `loss` among the settings, scale and bias start where that loss wants them unless they
        are set: those of "siglip" at 10 and -10, as in the paper (Zhai et al. 2023, arXiv
        2303.15343) and OpenCLIP.
        """
        names = [field.name for field in fields(cls)]
        chosen = {name: settings[name] for name in names if settings.get(name) is not None}
        if loss := TRAINABLE.get(settings.get("loss", "")):
            starts = {"init_logit_scale": loss.initial_scale, "init_logit_bias": loss.initial_bias}
            chosen = {k: value for k, value in starts.items() if value is not None} | chosen
        return cls(**chosen)

    def given(self, *names: str) -> list[str]:
        """Those of the named options that differ from their defaults, as they are typed."""
        default = ModelOptions()
        return [option(name) for name in names if getattr(self, name) != getattr(default, name)]
