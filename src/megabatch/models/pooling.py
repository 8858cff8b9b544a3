"""One feature per text from a transformer's last hidden states."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Pooling = Literal["mean", "cls", "last"]


def pool(states: Tensor, mask: Tensor, pooling: Pooling) -> Tensor:
    """Features (n, d): the mean over a text's tokens, its first token's or its last one's.

    Args:
        states: (n, length, d).
        mask: (n, length), of any dtype; 0 marks padding, which may be on either side.
        pooling: which of the three.
    """
    if pooling == "cls":
        return states[:, 0]
    if pooling == "last":
        positions = torch.arange(states.shape[1], device=states.device)
        last = torch.where(mask.bool(), positions, 0).amax(dim=1)
        return states[torch.arange(len(states), device=states.device), last]
    weight = mask.unsqueeze(-1).to(states.dtype)
    return (states * weight).sum(1) / weight.sum(1).clamp(min=1)
