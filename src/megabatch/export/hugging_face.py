"""Folders as transformers' `save_pretrained` writes them."""

from __future__ import annotations

import inspect
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from megabatch.evaluation.run_folder import Opened
from megabatch.models.hf_images import PROCESSORS
from megabatch.models.huggingface import FolderTokenizer, TextEncoder, read_config
from megabatch.models.padding import Pooling

_POOLED: dict[Pooling, str] = {
    "mean": "the mean over the tokens",
    "cls": "the first token",
    "last": "the last token",
}


def write_encoder(opened: Opened, folder: Path) -> list[str]:
    """Write a text encoder and its tokenizer; see `Writer`."""
    module: Any = opened.towers.module
    tokenizer: Any = opened.towers.tokenizer
    save_encoder(module.visual, tokenizer, folder)
    note = (
        "the folder has the encoder alone: an embedding is "
        f"{_POOLED[module.visual.pooling]} of its last hidden states, normalised"
    )
    if without_pooler(module.visual):
        note += "; add_pooling_layer=False loads it without a pooler, which no embedding uses"
    return [note]


def without_pooler(encoder: TextEncoder) -> dict[str, bool]:
    """The arguments with which `AutoModel` loads a saved encoder without a pooler."""
    parameters = inspect.signature(type(encoder.encoder)).parameters
    return {"add_pooling_layer": False} if "add_pooling_layer" in parameters else {}


def save_encoder(encoder: TextEncoder, tokenizer: FolderTokenizer, folder: Path) -> None:
    """Save an encoder as `AutoModel` loads it, and its tokenizer; without a pooler, if it has one.

    No feature uses it. See `without_pooler`.
    """
    model: Any = encoder.encoder
    model.save_pretrained(folder)
    save_tokenizer(tokenizer, folder)


def save_tokenizer(tokenizer: FolderTokenizer, folder: Path) -> None:
    """Save a tokenizer that truncates texts to the run's context length."""
    from transformers import AutoTokenizer

    # Read again: the one in use also stores its padding and truncation.
    own = AutoTokenizer.from_pretrained(tokenizer.folder, local_files_only=True)
    own.model_max_length = tokenizer.context_length
    own.save_pretrained(folder)


def write_clip(opened: Opened, folder: Path) -> list[str]:
    """Write a model of images and texts, its tokenizer and image processor; see `Writer`."""
    import transformers

    module: Any = opened.towers.module
    tokenizer: Any = opened.towers.tokenizer
    model = transformers.AutoModel.from_config(read_config(tokenizer.folder)).float()
    state = {
        name.removeprefix("visual.").removeprefix("text."): value
        for name, value in module.state_dict().items()
    }
    notes = save_clip(model, state, folder)
    save_tokenizer(tokenizer, folder)
    for name in PROCESSORS:
        if (tokenizer.folder / name).is_file():
            shutil.copyfile(tokenizer.folder / name, folder / name)
    return notes


def save_clip(model: Any, state: dict[str, Tensor], folder: Path) -> list[str]:
    """Save a model of images and texts with these weights; returns a note if it loses a bias."""
    bias = None if hasattr(model, "logit_bias") else state.pop("logit_bias", None)
    model.load_state_dict(state)
    model.save_pretrained(folder)
    if bias is None:
        return []
    return [
        f"{type(model).__name__} has no logit bias: the run's, {float(bias):.4g}, is left out; "
        "embeddings do not depend on it"
    ]


def write_json(path: Path, content: Mapping[str, Any] | list[Any]) -> None:
    """Write a file of settings."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
