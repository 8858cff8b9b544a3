"""open_clip's models, with their own configurations, transforms and tokenizers.

Their text towers take texts that are shorter than their context.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import open_clip
import torch
import torch.nn.functional as F
from open_clip.model import CLIP, CustomTextCLIP
from open_clip.transformer import TextTransformer, text_global_pool
from torch import Tensor, nn

from megabatch.errors import UsageError, one_line
from megabatch.models import weights as files
from megabatch.models.images import multiply_patches, with_bytes
from megabatch.models.names import CONFIGURATION, OPENCLIP
from megabatch.models.padding import Lengths, up_to_first, up_to_largest
from megabatch.models.towers import ModelOptions, Towers


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
    if "multimodal_cfg" in config:
        raise UsageError(f"--model: {name} also writes captions (CoCa), expected two towers")
    weights = _weights_of(name, weights)
    stored = {} if weights is None else files.load(weights)
    starts = ("init_logit_scale", "init_logit_bias")
    given = {name: getattr(options, name) for name in starts if getattr(options, name) is not None}
    bias = given.get("init_logit_bias", config.get("init_logit_bias"))
    if "logit_bias" in stored:
        given.setdefault("init_logit_bias", 0.0)  # else the model has none to load it into
    with _quietly():
        try:
            module, *transforms = open_clip.create_model_and_transforms(
                name,
                pretrained=None if weights is None else str(weights.absolute()),
                pretrained_image=False,  # these two would download
                pretrained_text=False,
                output_dict=True,
                force_patch_dropout=options.force_patch_dropout,
                force_image_size=options.force_image_size,
                force_context_length=options.force_context_length,
                **given,
            )
        except Exception as error:  # its type depends on the library of the architecture
            label = "--model" if weights is None else f"--pretrained {weights}"
            reason = one_line(error, 240)
            raise UsageError(f"{label}: open_clip cannot build {name} here: {reason}") from error
        text = json.dumps(config.get("text_cfg", {}), sort_keys=True)
        tokenizer = _tokenizer(name, options.force_context_length, text)
    kinds = {type(part).__name__ for part in module.visual.modules()}
    if options.force_patch_dropout and not any("PatchDropout" in kind for kind in kinds):
        raise UsageError(f"--force-patch-dropout: the image tower of {name} drops no patches")
    if stored and "logit_bias" not in stored and bias is not None:
        # open_clip starts it at 0, where negative pairs make up most of a sigmoid loss.
        nn.init.constant_(module.logit_bias, bias)
    multiply_patches(module.visual)
    lengths = accept_short_texts(module)
    return Towers(
        name,
        module.train(),
        *with_bytes(module.visual, *transforms),
        tokenizer,
        config["embed_dim"],
        lengths={} if lengths is None else {"text": lengths},
    )


def read_config(name: str) -> dict[str, Any]:
    """A new copy of the configuration of a model that `create` takes, as open_clip has it.

    Raises:
        UsageError: a folder's configuration cannot be read.
    """
    try:
        config: dict[str, Any] = open_clip.get_model_config(name)
        return config
    except (OSError, ValueError, AttributeError) as error:
        reason = one_line(error, 240)
        raise UsageError(f"--model {name}: {CONFIGURATION} cannot be used: {reason}") from error


def _weights_of(name: str, weights: Path | None) -> Path | None:
    """The file of a model's weights: a folder's own, or those given, of no folder with its own."""
    if name.startswith(OPENCLIP):
        if weights is not None:
            raise UsageError(f"--pretrained: {name} has its own weights; leave out this option")
        return files.find(Path(name.removeprefix(OPENCLIP)))
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
    try:
        tokenizer: Callable[[Any], Any] = open_clip.get_tokenizer(name, context_length, **safe)
        return tokenizer
    except Exception as error:  # Hugging Face tokenizers: not installed, not in the local cache ...
        raise UsageError(f"--model: the tokenizer of {name}: {one_line(error, 240)}") from error


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Keep open_clip from warning that random weights are random, and transformers from asking.

    open_clip warns through the root logger. transformers asks the user whether to run the code of a
    text tower's folder, as open_clip does not pass `trust_remote_code`.
    """
    with contextlib.ExitStack() as stack:
        stack.callback(logging.disable, logging.root.manager.disable)
        logging.disable(logging.WARNING)
        with contextlib.suppress(ImportError):  # open_clip says so
            from transformers import dynamic_module_utils as asking

            stack.callback(setattr, asking, "TIME_OUT_REMOTE_CODE", asking.TIME_OUT_REMOTE_CODE)
            asking.TIME_OUT_REMOTE_CODE = 0  # seconds to answer; then it is refused
        yield


def accept_short_texts(module: nn.Module) -> Lengths | None:
    """Let an open_clip model take short texts; returns the lengths that leave features as they are.

    open_clip adds all positions to a text, and hands the whole causal mask to attention: with fewer
    tokens both fail. Here they are cut to the text; the classes are open_clip's own otherwise.

    None: its features may depend on padding, as without a causal mask (SigLIP, some MobileCLIP), or
    with the feature at the last position (CLIPA), or its tower is of an unknown kind, or of a
    release of open_clip that encodes texts in another way.
    """
    model: Any = module
    text: Any = {CLIP: model, CustomTextCLIP: getattr(model, "text", None)}.get(type(model))
    if type(text) is CLIP:
        short, pool_type, eos = _ShortTextCLIP, text.text_pool_type, text.text_eos_id
    elif type(text) is TextTransformer and text.cls_emb is None:
        short, pool_type, eos = _ShortTextTransformer, text.pool_type, text.eos_id
    else:
        return None
    if text.attn_mask is None or pool_type not in ("argmax", "eos"):
        return None
    own, whole = type(text), _features(model, model.context_length)
    try:
        text.__class__ = short
        torch.testing.assert_close(_features(model, 2), whole, rtol=1e-3, atol=1e-3, equal_nan=True)
    except Exception:  # another release may encode texts elsewhere than in the methods below
        text.__class__ = own
        return None
    return up_to_largest if pool_type == "argmax" else functools.partial(up_to_first, token=eos)


def _features(model: Any, context: int) -> Tensor:
    """The features of a text of two tokens, with padding up to the context."""
    tokens = torch.tensor([[1, 2] + [0] * (context - 2)], device=model.logit_scale.device)
    with torch.no_grad():
        output = model(text=tokens)
    features: Tensor = output["text_features"] if isinstance(output, dict) else output[1]
    return features


class _ShortTextCLIP(CLIP):  # type: ignore[misc, unused-ignore]
    def _encode_text(self, text: Tensor, normalize: bool = False) -> Tensor:
        """open_clip's, with positions and mask cut to the text."""
        length = text.shape[1]
        dtype = self.transformer.get_cast_dtype()
        x = self.token_embedding(text).to(dtype) + self.positional_embedding[:length].to(dtype)
        x = self.ln_final(self.transformer(x, attn_mask=_cut(self.attn_mask, length)))
        x = text_global_pool(x, text, self.text_pool_type, eos_token_id=self.text_eos_id)
        if isinstance(self.text_projection, nn.Linear):
            x = self.text_projection(x)
        elif self.text_projection is not None:
            x = x @ self.text_projection
        return F.normalize(x, dim=-1) if normalize else x

    # `forward` calls this one in open_clip 3, and the other one in its main branch of 2026.
    encode_text = _encode_text


class _ShortTextTransformer(TextTransformer):  # type: ignore[misc, unused-ignore]
    def _embeds(self, text: Tensor) -> tuple[Tensor, Tensor]:
        x, mask = super()._embeds(text)  # which cuts the positions
        return x, _cut(mask, x.shape[1])


def _cut(mask: Tensor, length: int) -> Tensor:
    """The mask of shorter texts, contiguous as that of whole ones, so that one graph takes both."""
    return mask[:length, :length].contiguous()
