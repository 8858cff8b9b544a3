"""Models out of a folder that transformers' `save_pretrained` wrote."""

from __future__ import annotations

from pathlib import Path

from megabatch.models import hf_text_pair, hf_two_towers
from megabatch.models.hf_folder import read_config
from megabatch.models.options import ModelOptions
from megabatch.models.towers import Towers

#: What the name of such a model begins with; the rest is the folder.
PREFIX = "hf:"


def create(name: str, weights: Path | None, options: ModelOptions) -> Towers:
    """Build a two-tower model of images and texts, or a pair of text encoders out of any other.

    Args:
        name: "hf:PATH". Without a file of weights in the folder the model starts at random.
        weights: a file of the whole model's weights, as a run wrote them, that `weights.find`
            gave; or None.
        options: changes to the model's own configuration; pooling and one or two encoders for a
            pair of texts.

    Raises:
        UsageError: transformers is not installed, or cannot read the folder; the weights are
            another model's; an option that this model has not.
    """
    folder = Path(name.removeprefix(PREFIX))
    config = read_config(folder)
    images = hasattr(config, "vision_config") and hasattr(config, "text_config")
    kind = hf_two_towers if images else hf_text_pair
    return kind.create(name, folder, config, weights, options)
