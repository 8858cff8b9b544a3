"""open_clip's text towers for texts that are shorter than their context.

open_clip adds all positions to a text, and hands the whole causal mask to attention: with fewer
tokens both fail. Here they are cut to the text. The classes are open_clip's own otherwise.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from open_clip.model import CLIP, CustomTextCLIP
from open_clip.transformer import TextTransformer, text_global_pool
from torch import Tensor, nn

from megabatch.models.padding import (
    Lengths,
    is_masked_kind,
    up_to_first,
    up_to_largest,
    without_padding,
)

#: Poolers of open_clip's `HFTextEncoder` that leave padding out.
_POOLERS = ("MeanPooler", "ClsPooler", "ClsLastHiddenStatePooler")


def accept_short_texts(module: nn.Module) -> Lengths | None:
    """Let an open_clip model take short texts; returns the lengths that leave features as they are.

    None: its features may depend on padding, as without a causal mask (SigLIP, some MobileCLIP), or
    with the feature at the last position (CLIPA), or its tower is of an unknown kind, or of a
    release of open_clip that encodes texts in another way.
    """
    model: Any = module
    text: Any = {CLIP: model, CustomTextCLIP: getattr(model, "text", None)}.get(type(model))
    short: type[nn.Module]
    if type(text) is CLIP:
        short = _ShortTextCLIP
        lengths = _causal_lengths(text.attn_mask, text.text_pool_type, text.text_eos_id)
    elif type(text) is TextTransformer and text.cls_emb is None:
        short = _ShortTextTransformer
        lengths = _causal_lengths(text.attn_mask, text.pool_type, text.eos_id)
    else:
        return _masked_lengths(text)
    if lengths is None:
        return None
    own = type(text)
    try:
        whole = _features_of_a_text(module, model.context_length)
        text.__class__ = short
        torch.testing.assert_close(
            _features_of_a_text(module, 2), whole, rtol=1e-3, atol=1e-3, equal_nan=True
        )
    except Exception:  # another release may encode texts elsewhere than in the methods below
        text.__class__ = own
        return None
    return lengths


def _features_of_a_text(module: Any, context: int) -> Tensor:
    """The features of a text of two tokens and padding."""
    tokens = [[1, 2] + [0] * (context - 2)]
    with torch.no_grad():
        output = module(text=torch.tensor(tokens, device=module.logit_scale.device))
    features: Tensor = output["text_features"] if isinstance(output, dict) else output[1]
    return features


def _causal_lengths(mask: Tensor | None, pool_type: str, eos: int) -> Lengths | None:
    if mask is None:
        return None
    if pool_type == "argmax":
        return up_to_largest
    return functools.partial(up_to_first, token=eos) if pool_type == "eos" else None


def _masked_lengths(text: Any) -> Lengths | None:
    """For open_clip's adapter of a transformers encoder."""
    config: Any = getattr(text, "config", None)
    if type(getattr(text, "pooler", None)).__name__ not in _POOLERS or not is_masked_kind(config):
        return None
    return functools.partial(without_padding, pad=config.pad_token_id)


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
