"""open_clip's models, with their own configurations, transforms and tokenizers."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from megabatch.errors import UsageError
from megabatch.models.towers import Towers


def names() -> list[str]:
    """The architectures that open_clip knows, those added by `open_clip.add_model_config` too."""
    import open_clip

    return list(open_clip.list_models())


def create(name: str, weights: Path | None) -> Towers:
    """Build an open_clip model by name; `weights`: a .safetensors file that exists, or None.

    Raises:
        UsageError: open_clip cannot build the model here, or the weights are not its own.
    """
    import open_clip

    config = open_clip.get_model_config(name)
    if "multimodal_cfg" in config:
        raise UsageError(f"model: {name} also writes captions (CoCa), expected two towers")
    with _without_warnings():
        try:
            module, train_transform, eval_transform = open_clip.create_model_and_transforms(
                name,
                pretrained=None if weights is None else str(weights),
                pretrained_image=False,  # these two would download
                pretrained_text=False,
                output_dict=True,
            )
        except Exception as error:
            # Which kinds come depends on the architecture's own library and on the weights.
            raise UsageError(_could_not_build(name, weights, error)) from error
        tokenizer = _tokenizer(name)
    return Towers(
        name, module.train(), train_transform, eval_transform, tokenizer, config["embed_dim"]
    )


def _could_not_build(name: str, weights: Path | None, error: Exception) -> str:
    reason = _one_line(error)
    if weights is None:
        return f"model: open_clip cannot build {name} here: {reason}"
    return f"pretrained: {weights} does not hold the weights of {name}: {reason}"


def _tokenizer(name: str) -> Callable[[Any], torch.Tensor]:
    import open_clip

    try:
        tokenizer: Callable[[Any], torch.Tensor] = open_clip.get_tokenizer(name)
    except Exception as error:  # Hugging Face tokenizers: not installed, not in the local cache ...
        raise UsageError(f"model: the tokenizer of {name}: {_one_line(error)}") from error
    return tokenizer


@contextlib.contextmanager
def _without_warnings() -> Iterator[None]:
    """open_clip warns through the root logger that random weights are random."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 240 else text[:237] + "..."
