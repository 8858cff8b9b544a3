"""A very small open_clip architecture with timm's NaFlexVit, whose patches have 4 x 4 pixels."""

from __future__ import annotations

from typing import Any

import open_clip
from timm.models import register_model
from timm.models.naflexvit import NaFlexVit, NaFlexVitCfg

from tests.models.tiny import TINY

NAFLEX = "megabatch-test-naflex"


@register_model
def naflexvit_megabatch_test(
    pretrained: bool = False, num_classes: int = 0, patch_drop_rate: float = 0.0, **_: Any
) -> NaFlexVit:
    sizes: Any = {"patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2}
    config = NaFlexVitCfg(**sizes, pos_embed_grid_size=(4, 4), patch_drop_rate=patch_drop_rate)
    return NaFlexVit(config, num_classes=num_classes)


CONFIG: Any = {
    **open_clip.get_model_config(TINY),
    "vision_cfg": {
        "image_size": 32,
        "timm_model_name": "naflexvit_megabatch_test",
        "timm_pool": "map",
        "timm_proj": "none",
    },
}
open_clip.factory._MODEL_CONFIGS[NAFLEX] = CONFIG
