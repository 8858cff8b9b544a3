"""Attention of transformers' models by kernels of short sequences, such as of texts.

transformers has registries of attention and of masks, where these functions have a name. What the
kernels do not compute stays with its `sdpa`. The masks of that take a look at the padding on the
host, as torch has faster kernels without a mask; ours do not make the host wait.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import bidirectional_mask_function, sdpa_mask

from megabatch.models.short_attention import LONGEST, WIDTHS, short_attention
from megabatch.similarity.backends import kernels_available

#: The name in the registries. Saved configs lack it, as transformers saves no kind of attention.
NAME = "megabatch_short"
_SEEDS = 2**62  # how many there are


def use_short_attention(module: nn.Module, kernels: bool | None) -> None:
    """As `blocks.use_fast_blocks`, for transformers' models that have its `sdpa`, the default."""
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, mask_of_keys)
    for model in module.modules():
        if not isinstance(model, PreTrainedModel) or model.config._attn_implementation != "sdpa":
            continue
        own = kernels_available(next(model.parameters())) if kernels is None else kernels
        if own and model.is_backend_compatible():
            model.set_attn_implementation({"": NAME})  # parts may have a choice of their own


def mask_of_keys(**given: Any) -> Tensor | None:
    """A mask for `attend`, bool (n, 1, 1, keys), True for what is seen; None: all is.

    given: see transformers' `sdpa_mask`, which makes the masks that are not of padding alone, or of
        longer sequences.
    """
    only_padding = given["mask_function"] is bidirectional_mask_function and (
        given.get("allow_is_bidirectional_skip") and not given.get("use_vmap")
    )
    mask: Tensor | None = given.get("attention_mask")
    if only_padding and given["kv_length"] <= LONGEST:
        # With dimensions for heads and queries, so that it is one for `sdpa`, too.
        return None if mask is None else mask[:, None, None, :]
    mask = sdpa_mask(**given)
    return mask


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention (n, length, heads, width) of (n, heads, length, width); see transformers' sdpa."""
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    fits = (
        not (attention_mask is None and causal)
        and others.get("position_bias") is None
        and others.get("softcap") is None
        and _fits(query, key, value, attention_mask, scaling)
    )
    if not fits:
        given = (query, key, value, attention_mask, dropout, scaling, is_causal)
        mixed: tuple[Tensor, None] = sdpa_attention_forward(module, *given, **others)
        return mixed
    qkv = torch.stack([part.transpose(1, 2) for part in (query, key, value)], 2)
    seen = None if attention_mask is None else attention_mask[:, 0, 0]
    seed = torch.randint(_SEEDS, (1,), device=query.device) if dropout else None
    return short_attention(qkv, False, seen, dropout, seed), None


def _fits(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float | None) -> bool:
    """Whether the kernels take these; causal attention and biases aside."""
    n, _, length, width = q.shape
    return (
        length <= LONGEST
        and width in WIDTHS
        and q.shape == k.shape == v.shape
        and q.dtype == k.dtype == v.dtype
        and q.element_size() == 2
        and scaling in (None, width**-0.5)
        and (mask is None or (mask.dtype == torch.bool and mask.shape == (n, 1, 1, length)))
    )
