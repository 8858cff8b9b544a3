"""open_clip's transformers with a faster forward pass; weights, features and gradients stay."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from open_clip.model import CLIP
from open_clip.transformer import (
    ResidualAttentionBlock,
    TextTransformer,
    Transformer,
    VisionTransformer,
)
from torch import Tensor, nn

from megabatch.models.openclip import ShortTextCLIP, ShortTextTransformer

#: Towers that give their blocks no mask or the causal one.
_TOWERS = (VisionTransformer, CLIP, TextTransformer, ShortTextCLIP, ShortTextTransformer)


def replace_blocks(module: nn.Module) -> None:
    """As `blocks.use_fast_blocks`; transformers of other kinds stay as they are."""
    towers: list[Any] = [getattr(module, "visual", None), getattr(module, "text", module)]
    for tower in towers:
        if not _is_known(tower):
            continue
        for block in tower.transformer.resblocks:
            # Another class rather than another module: names of weights and hooks stay.
            block.__class__ = FastBlock
            block.causal = getattr(tower, "attn_mask", None) is not None


def _is_known(tower: Any) -> bool:
    if type(tower) not in _TOWERS or type(tower.transformer) is not Transformer:
        return False
    if getattr(tower, "use_pad_mask", False) or getattr(tower, "cls_emb", None) is not None:
        return False  # blocks would get another mask than the causal one
    return all(
        type(block) is ResidualAttentionBlock
        and type(block.attn) is nn.MultiheadAttention
        and block.attn.batch_first
        and block.attn.dropout == 0
        for block in tower.transformer.resblocks
    )


class FastBlock(ResidualAttentionBlock):  # type: ignore[misc, unused-ignore]
    """A block whose queries, keys and values are views of one product.

    `nn.MultiheadAttention` swaps batch and sequence and copies each of the three. And it adds the
    causal mask to the logits, which fewer kernels can do than leave out what it hides.

    Attributes:
        causal: whether tokens see only those before them.
    """

    causal: bool

    def forward(
        self, q_x: Tensor, k_x: None = None, v_x: None = None, attn_mask: Any = None
    ) -> Tensor:
        """The block's output, like q_x (n, length, width).

        Args:
            q_x: queries, keys and values before the first norm.
            k_x, v_x, attn_mask: open_clip's; unused. Graphs that used a mask would be compiled anew
                for some shapes of it.
        """
        weight, bias, out = self.attn.in_proj_weight, self.attn.in_proj_bias, self.attn.out_proj
        heads = self.attn.num_heads, self.attn.head_dim
        qkv = F.linear(self.ln_1(q_x), weight, bias).unflatten(-1, (3, *heads))
        x: Tensor = q_x + self.ls_1(out(self._attention(qkv).flatten(2)))
        return x + self.ls_2(self.mlp(self.ln_2(x)))

    def _attention(self, qkv: Tensor) -> Tensor:
        """Attention (n, length, heads, width of a head) within each sequence."""
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))
        return F.scaled_dot_product_attention(q, k, v, is_causal=self.causal).transpose(1, 2)
