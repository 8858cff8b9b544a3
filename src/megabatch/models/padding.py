"""Padded texts: the tokens that count, and one feature per text from those of its tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from megabatch.gradient_cache.by_length import up_to_last

#: The number of tokens that a text's features depend on: int64 (n,), at least 1, of padded tokens,
#: int64 (n, context_length). With those after them cut off, the features stay the same. Likewise
#: the patches of images in a mapping of tensors (n, length, ...).
Lengths: TypeAlias = Callable[[Any], Tensor]
Pooling = Literal["mean", "cls", "last"]

#: Types of transformers' text encoders for which `without_padding` is right: they mask padding in
#: attention, count positions from the left, and mix tokens in attention alone. Convolutions
#: (DeBERTa, ConvBERT), Fourier transforms (FNet) and attention whose pattern depends on the length
#: (BigBird, Nystromformer) would read the padding.
MASKED_KINDS = frozenset(
    {
        *("albert", "bert", "camembert", "distilbert", "electra", "modernbert", "mpnet"),
        *("roberta", "xlm-roberta"),
    }
)


def up_to_largest(tokens: Tensor) -> Tensor:
    """Under a causal mask, with the feature at the largest token, CLIP's end of text."""
    return tokens.argmax(1) + 1


def up_to_first(tokens: Tensor, token: int) -> Tensor:
    """Under a causal mask, with the feature at the first of these tokens, or at 0 without one."""
    return (tokens == token).int().argmax(1) + 1


def without_padding(tokens: Tensor, pad: int) -> Tensor:
    """With padding masked in attention and pooling; a text without any token keeps its padding."""
    return up_to_last(tokens != pad)


def trimmed(tokens: Any, lengths: Lengths) -> Any:
    """Tokens without the columns that are padding in all texts, but for a multiple of 8 columns.

    With multiples there are few different shapes to compile. Likewise a mapping's tensors.
    """
    counts = lengths(tokens)
    if not len(counts):
        return tokens
    columns = slice(-(-int(counts.max()) // 8) * 8)
    if isinstance(tokens, Mapping):
        return {name: tensor[:, columns] for name, tensor in tokens.items()}
    return tokens[:, columns]


def counted(features: Tensor) -> Tensor:
    """The mask (n, length), bool, of features (n, length, d) that are zeros where none counts."""
    return features.ne(0).any(-1)


def pool(states: Tensor, mask: Tensor, pooling: Pooling) -> Tensor:
    """Features (n, d): the mean over a text's tokens, its first token's or its last one's.

    Args:
        states: (n, length, d).
        mask: (n, length), of any dtype; 0 marks padding, which may be on either side.
        pooling: which of the three.
    """
    if pooling != "mean":
        rows, positions = (torch.arange(n, device=states.device) for n in states.shape[:2])
        if pooling == "cls":
            return states[rows, mask.bool().int().argmax(dim=1)]
        return states[rows, torch.where(mask.bool(), positions, 0).amax(dim=1)]
    weight = mask.unsqueeze(-1).to(states.dtype)
    return (states * weight).sum(1) / weight.sum(1).clamp(min=1)
