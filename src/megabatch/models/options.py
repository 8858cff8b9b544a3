"""Options for building a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from megabatch.hints import option
from megabatch.losses.registry import TRAINABLE
from megabatch.models.pooling import Pooling


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
        hf_pooling: for "hf:" models, the feature of a text: the mean over its tokens, the first
            token or the last one.
        hf_share: for "hf:" models, one encoder for both texts; otherwise two, with equal initial
            weights.
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

    def given(self, *names: str) -> list[str]:
        """Those of the named options that differ from their defaults, in command line notation."""
        default = ModelOptions()
        return [option(name) for name in names if getattr(self, name) != getattr(default, name)]
