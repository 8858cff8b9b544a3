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

from megabatch.models.padding import Lengths, up_to_first, up_to_largest


def accept_short_texts(module: nn.Module) -> Lengths | None:
    """Let an open_clip model take short texts; returns the lengths that leave features as they are.

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
