"""A folder as OpenCLIP writes it for the hub: configuration, weights, tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megabatch.errors import UsageError
from megabatch.evaluation.run_folder import Opened
from megabatch.models import ModelOptions
from megabatch.models.openclip import read_config
from megabatch.training.checkpoint import save_tensors

#: The settings of a transform that OpenCLIP stores; the image's size is the model's.
_PREPROCESSING = ("mean", "std", "interpolation", "resize_mode")


def write(opened: Opened, folder: Path) -> list[str]:
    """Write `open_clip_config.json`, `open_clip_model.safetensors` and a tokenizer if it has files.

    `open_clip.create_model_and_transforms("local-dir:FOLDER")` and `open_clip.get_tokenizer` of the
    same name read them; see `Writer`.
    """
    module: Any = opened.towers.module
    config = model_config(opened)
    preprocessing = {name: module.visual.preprocess_cfg[name] for name in _PREPROCESSING}
    written = {"model_cfg": config, "preprocess_cfg": preprocessing}
    (folder / "open_clip_config.json").write_text(json.dumps(written, indent=2), encoding="utf-8")
    save_tensors(module.state_dict(), folder / "open_clip_model.safetensors")
    tokenizer: Any = opened.towers.tokenizer
    if hasattr(tokenizer, "save_pretrained"):  # Hugging Face's; OpenCLIP comes with its own
        tokenizer.save_pretrained(folder)
    encoder = config["text_cfg"].get("hf_model_name")
    if encoder is None:
        return []
    return [f"OpenCLIP reads the configuration of {encoder} from the hub or its local cache"]


def model_config(opened: Opened) -> dict[str, Any]:
    """An OpenCLIP model's configuration with the run's changes.

    Raises:
        UsageError: it has no setting for a change.
    """
    options = ModelOptions.of(opened.config)
    config = read_config(opened.towers.name)
    size, timm = config["vision_cfg"].get("image_size"), "timm_model_name" in config["vision_cfg"]
    if timm and options.force_image_size not in (None, size):
        raise UsageError(
            f"--to openclip: {opened.towers.name} with --force-image-size "
            f"{options.force_image_size}, but OpenCLIP builds timm's towers at their own size, "
            f"{size}, only"
        )
    changes = {
        ("vision_cfg", "patch_dropout"): options.force_patch_dropout,
        ("vision_cfg", "image_size"): options.force_image_size,
        ("text_cfg", "context_length"): options.force_context_length,
    }
    for (part, name), value in changes.items():
        if value is not None:
            config[part][name] = value
    module: Any = opened.towers.module
    if module.logit_bias is not None and config.get("init_logit_bias") is None:
        config["init_logit_bias"] = 0.0  # without it the model would have no bias to load
    return config
