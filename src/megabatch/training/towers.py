"""The model of a run: built, locked, and fit for its loss."""

from __future__ import annotations

from megabatch.config.file import to_dict
from megabatch.config.settings import TrainConfig
from megabatch.errors import UsageError
from megabatch.losses.registry import TRAINABLE
from megabatch.models import ModelOptions, Towers, create
from megabatch.models.layers import layer_ids
from megabatch.models.locking import lock
from megabatch.models.tower_weights import load_tower


def build_towers(config: TrainConfig) -> Towers:
    """Build the configuration's model and lock what it says.

    Raises:
        UsageError: the model cannot be built, or cannot be trained as configured.
    """
    options = ModelOptions.of(to_dict(config))
    towers = create(config.model, pretrained=config.pretrained, options=options)
    module = towers.module
    if config.pretrained_image_path is not None:
        load_tower(module, "image", config.pretrained_image_path)
    if config.pretrained_text_path is not None:
        load_tower(module, "text", config.pretrained_text_path)
    if config.lock_image:
        unlocked = config.lock_image_unlocked_groups
        lock(module, "image", unlocked=unlocked, freeze_bn_stats=config.lock_image_freeze_bn_stats)
    if config.lock_text:
        lock(module, "text", unlocked=config.lock_text_unlocked_layers)
    bias = getattr(module, "logit_bias", None)
    if bias is not None and not TRAINABLE[config.loss].takes_bias:
        # It cancels in a softmax: DDP would wait for a gradient that does not come.
        bias.requires_grad_(False)
    if config.layer_decay is not None and not layer_ids(module):
        raise UsageError(f"--layer-decay: {config.model} has no numbered layers")
    if max(config.matryoshka_dims, default=0) > towers.embed_dim:
        raise UsageError(
            f"--matryoshka-dims {max(config.matryoshka_dims)}: the features of {config.model} "
            f"have only {towers.embed_dim}"
        )
    return towers
