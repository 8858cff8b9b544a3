"""Random models of images and texts of each kind, two layers per tower, in folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.tiny_bert import save_tiny_bert

_SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
_TEXT = {**_SIZES, "vocab_size": 12, "intermediate_size": 32, "max_position_embeddings": 12}
_VISION = {**_SIZES, "image_size": 32, "patch_size": 16, "intermediate_size": 32}
_NAMES = {
    "altclip": "AltCLIP",
    "chinese_clip": "ChineseCLIP",
    "clip": "CLIP",
    "metaclip_2": "MetaClip2",
    "siglip": "Siglip",
}


def save_tiny_clip(path: Path, kind: str) -> Path:
    """A model of that kind with the tokenizer of letters and an image processor."""
    transformers = pytest.importorskip("transformers")
    save_tiny_bert(path)  # for its tokenizer
    torch.manual_seed(1)
    tiny_model(kind).save_pretrained(path)
    processor = transformers.CLIPImageProcessor(
        size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}
    )
    if kind == "siglip":
        processor = transformers.SiglipImageProcessor(size={"height": 32, "width": 32})
    processor.save_pretrained(path)
    return path


def tiny_model(kind: str) -> Any:
    """As transformers makes it."""
    import transformers

    if kind == "vision-text-dual-encoder":
        vision, text = transformers.ViTConfig(**_VISION), transformers.BertConfig(**_TEXT)
        make = transformers.VisionTextDualEncoderConfig.from_vision_text_configs
        return transformers.VisionTextDualEncoderModel(make(vision, text, projection_dim=8))
    name = _NAMES[kind]
    if not hasattr(transformers, f"{name}Model"):
        pytest.skip(f"this transformers has no {name}Model")
    special = {"eos_token_id": 3, "bos_token_id": 2, "pad_token_id": 0}
    text = {**_TEXT, **special}
    towers: dict[str, Any] = {"text_config": text, "vision_config": dict(_VISION)}
    if kind == "siglip":
        text["projection_size"] = 16
    else:
        towers["projection_dim"] = 8
        text["project_dim"] = 16  # of AltCLIP's text tower alone
    return getattr(transformers, f"{name}Model")(getattr(transformers, f"{name}Config")(**towers))
