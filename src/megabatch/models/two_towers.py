"""A module of two towers, a scale and an optional bias, for models that are not open_clip's."""

from __future__ import annotations

import math
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megabatch.models import weights as files
from megabatch.models.options import ModelOptions
from megabatch.models.towers import outputs


class TwoTowers(nn.Module):
    """Two towers with the interface of `Towers.module`.

    Args:
        visual: images to features (n, d), not normalised.
        text: tokens to features (n, d), not normalised.
        options: initial scale and bias; default: open_clip's scale, and no bias.
    """

    def __init__(
        self, visual: nn.Module, text: nn.Module, options: ModelOptions | None = None
    ) -> None:
        super().__init__()
        options = options or ModelOptions()
        self.visual = visual
        self.text = text
        start, bias = options.init_logit_scale, options.init_logit_bias
        self.logit_scale = nn.Parameter(
            torch.tensor(math.log(1 / 0.07) if start is None else start)
        )
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
        features = self.text(text)
        return F.normalize(features, dim=-1) if normalize else features

    def forward(
        self, image: Tensor | None = None, text: Tensor | None = None
    ) -> dict[str, Tensor | None]:
        """Normalised features of both, and the scale; see `Towers`."""
        return outputs(self, image, text)

    def lock_image_tower(self, unlocked_groups: int = 0, freeze_bn_stats: bool = False) -> None:
        """Freeze the image tower; the interface is open_clip's."""
        _lock(self.visual, unlocked_groups)

    def lock_text_tower(self, unlocked_layers: int = 0) -> None:
        """Freeze the text tower."""
        _lock(self.text, unlocked_layers)


def _lock(tower: nn.Module, unlocked: int) -> None:
    if unlocked:
        raise ValueError(
            f"this model's towers can only be locked as a whole, got {unlocked} unlocked"
        )
    tower.requires_grad_(False)


def load(module: TwoTowers, weights: Path, name: str) -> None:
    """Load a whole model's weights.

    A bias that the file lacks keeps its initial value; one that the module lacks is added.

    Raises:
        UsageError: the file holds another model's weights.
    """
    state = files.load(weights)
    if "logit_bias" in state and module.logit_bias is None:
        module.logit_bias = nn.Parameter(torch.zeros(()))
    if "logit_bias" not in state and module.logit_bias is not None:
        state["logit_bias"] = module.logit_bias.detach()
    files.fill(module, state, weights, name)
