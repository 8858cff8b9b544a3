"""open_clip's models, with their own configurations, transforms and tokenizers.

Their text towers take texts that are shorter than their context.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import open_clip
import torch
from open_clip.model import CLIP
from open_clip.transformer import TextTransformer
from torch import Tensor, nn

from megabatch.errors import UsageError, as_usage_error
from megabatch.models import weights as files
from megabatch.models.images import multiply_patches, with_bytes
from megabatch.models.naflex import valid_patches, with_patches
from megabatch.models.names import CONFIGURATION, OPENCLIP, is_trained
from megabatch.models.padding import Lengths, up_to_first, up_to_largest
from megabatch.models.towers import ModelOptions, Tower, Towers

IMAGE_SEQ_LEN = "image_seq_len"  # in configurations


def create(name: str, weights: Path | None, options: ModelOptions) -> Towers:
    """Build an open_clip model by name, or "local-dir:PATH".

    Args:
        name: as above.
        weights: a file from `weights.find`, or None; always None for a folder, which has its own.
        options: changes to the model's own configuration.

    Raises:
        UsageError: open_clip cannot build the model here, or the weights are another model's.
    """
    options.refuse(name, "hf_pooling", "hf_share")
    config = read_config(name)
    if "multimodal_cfg" in config or "vision_cfg" not in config:
        why = "also writes captions (CoCa)" if "multimodal_cfg" in config else "has no image tower"
        raise UsageError(f"--model: {name} {why}, expected an image and a text tower")
    weights = _weights_of(name, weights)
    stored = {} if weights is None else files.load(weights)
    starts = ("init_logit_scale", "init_logit_bias")
    given = {name: getattr(options, name) for name in starts if getattr(options, name) is not None}
    bias = given.get("init_logit_bias", config.get("init_logit_bias"))
    if "logit_bias" in stored:
        given.setdefault("init_logit_bias", 0.0)  # else the model has none to load it into
    label = "--model" if weights is None else f"--pretrained {weights}"
    with as_usage_error(f"{label}: open_clip cannot build {name} here"):
        module, *transforms = open_clip.create_model_and_transforms(
            name,
            pretrained=None if weights is None else str(weights.absolute()),
            load_weights=weights is not None,
            pretrained_image=False,  # these two would download
            pretrained_text=False,
            output_dict=True,
            force_patch_dropout=options.force_patch_dropout,
            force_image_size=options.force_image_size,
            force_context_length=options.force_context_length,
            **given,
        )
    text = json.dumps(config.get("text_cfg", {}), sort_keys=True)
    with as_usage_error(f"--model: the tokenizer of {name}"):
        tokenizer = _tokenizer(name, options.force_context_length, text)
    kinds = {type(part).__name__ for part in module.visual.modules()}
    if options.force_patch_dropout and not any("PatchDropout" in kind for kind in kinds):
        raise UsageError(f"--force-patch-dropout: the image tower of {name} drops no patches")
    if stored and "logit_bias" not in stored and bias is not None:
        # open_clip starts it at 0, where negative pairs make up most of a sigmoid loss.
        nn.init.constant_(module.logit_bias, bias)
    multiply_patches(module.visual)
    short = accept_short_texts(module)
    lengths: dict[Tower, Lengths] = {} if short is None else {"text": short}
    if length := options.image_seq_len or image_seq_len(name):
        transforms = [*with_patches(module.visual, length, name)]
        lengths["image"] = valid_patches
    else:
        transforms = [*with_bytes(module.visual, *transforms)]
    train, evaluation = transforms
    width = config["embed_dim"]
    return Towers(name, module.train(), train, evaluation, tokenizer, width, lengths=lengths)


def read_config(name: str) -> dict[str, Any]:
    """A new copy of the configuration of a model that `create` takes, as open_clip has it.

    Raises:
        UsageError: a folder's configuration cannot be read.
    """
    with as_usage_error(f"--model {name}: {CONFIGURATION} cannot be used"):
        config: dict[str, Any] = open_clip.get_model_config(name)
    return config


def image_seq_len(name: str) -> int | None:
    """The most patches of an image, if a model's configuration has a number.

    Newer versions of open_clip keep it in the model's configuration, exported folders beside that.
    """
    length: int | None = read_config(name)["vision_cfg"].get(IMAGE_SEQ_LEN)
    if length is None and name.startswith(OPENCLIP):
        file = Path(name.removeprefix(OPENCLIP)) / CONFIGURATION
        length = json.loads(file.read_text("utf-8")).get(IMAGE_SEQ_LEN)
    return length


def _weights_of(name: str, weights: Path | None) -> Path | None:
    """The file of a model's weights: a folder's own, or those given, of no folder with its own.

    None: they are random.
    """
    if name.startswith(OPENCLIP):
        if weights is not None:
            raise UsageError(f"--pretrained: {name} has its own weights, if any; leave this out")
        return files.find(Path(name.removeprefix(OPENCLIP))) if is_trained(name) else None
    if weights is not None and (weights.parent / CONFIGURATION).is_file():
        # They fit a model with another activation or other pixels as well.
        raise UsageError(
            f"--pretrained: {weights.parent} has a {CONFIGURATION} of its own; expected --model "
            f"{OPENCLIP}{weights.parent}, which takes both"
        )
    return weights


@functools.lru_cache(maxsize=8)
def _tokenizer(name: str, context_length: int | None, text_cfg: str) -> Callable[[Any], Any]:
    """The model's tokenizer, made once: a run creates its model to plan, train and evaluate it.

    text_cfg: the configuration of texts, as JSON.
    """
    # A folder's configuration could ask transformers to run code of the folder.
    safe = {"trust_remote_code": False} if json.loads(text_cfg).get("hf_tokenizer_name") else {}
    tokenizer: Callable[[Any], Any] = open_clip.get_tokenizer(name, context_length, **safe)
    return tokenizer


def accept_short_texts(module: nn.Module) -> Lengths | None:
    """Let an open_clip model take short texts; returns the lengths that leave features as they are.

    None: its features may depend on padding, as without a causal mask (SigLIP, some MobileCLIP), or
    with the feature at the last position (CLIPA), or its tower is of an unknown kind.
    """
    text: Any = getattr(module, "text", module)
    if type(text) is CLIP:
        short, pool_type, eos = ShortTextCLIP, text.text_pool_type, text.text_eos_id
    elif type(text) is TextTransformer and text.cls_emb is None:
        short, pool_type, eos = ShortTextTransformer, text.pool_type, text.eos_id
    else:
        return None
    if text.attn_mask is None or pool_type not in ("argmax", "eos"):
        return None
    by_token = functools.partial(up_to_first, token=eos)
    lengths: Lengths = up_to_largest if pool_type == "argmax" else by_token
    text.__class__, text.lengths = short, lengths
    return lengths


#: For forward passes that hide a parameter behind an attribute. torch.compile of a whole model
#: compiles what they call; torch 2.12, if it traced them, would delete the parameter as well.
_not_traced = torch.compiler.disable(recursive=False)


class ShortTextCLIP(CLIP):  # type: ignore[misc, unused-ignore]
    """A model whose texts may be shorter than its context."""

    @_not_traced
    def forward(self, image: Tensor | None = None, text: Tensor | None = None) -> Any:
        with _cut_to(self, text):
            return super().forward(image, text)

    @_not_traced
    def encode_text(self, text: Tensor, normalize: bool = False) -> Tensor:
        with _cut_to(self, text):
            return super().encode_text(text, normalize)


class ShortTextTransformer(TextTransformer):  # type: ignore[misc, unused-ignore]
    """A text tower likewise."""

    @_not_traced
    def forward(self, text: Tensor) -> Any:
        with _cut_to(self, text):
            return super().forward(text)


@contextlib.contextmanager
def _cut_to(tower: Any, text: Tensor | None) -> Iterator[None]:
    """Cut positions and causal mask, which open_clip uses whole, to the length of a text.

    Attributes of an object hide its parameters and buffers of the same names.
    """
    length = None if text is None else text.shape[1]
    hiding = {
        "positional_embedding": tower.positional_embedding[:length],
        # Contiguous as that of whole texts, so that one graph takes both.
        "attn_mask": tower.attn_mask[:length, :length].contiguous(),
    }
    vars(tower).update(hiding)
    if hasattr(tower.transformer, "lengths"):  # a `fast_blocks.PoolingTransformer`
        tower.transformer.tokens = text
    try:
        yield
    finally:
        for name in hiding:
            vars(tower).pop(name, None)  # None: `forward` called `encode_text`, which removed it
