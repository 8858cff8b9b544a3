"""open_clip's transformers with a faster forward pass; weights, features and gradients stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
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
from megabatch.similarity.backends import kernels_available

try:
    from megabatch.models.block_attention import LONGEST, block_attention
    from megabatch.models.mlp import COLUMNS, mlp
    from megabatch.models.short_attention import LONGEST as SHORT
    from megabatch.models.short_attention import WIDTHS, short_attention
except ImportError:  # there are no kernels without Triton
    WIDTHS = ()

#: Towers that give their blocks no mask or the causal one.
_TOWERS = (VisionTransformer, CLIP, TextTransformer, ShortTextCLIP, ShortTextTransformer)


def replace_blocks(module: nn.Module, kernels: bool | None) -> None:
    """As `blocks.use_fast_blocks`; transformers of other kinds stay as they are."""
    towers: list[Any] = [getattr(module, "visual", None), getattr(module, "text", module)]
    for tower in towers:
        if not _is_known(tower):
            continue
        blocks = list(tower.transformer.resblocks)
        for block in blocks:
            # Another class rather than another module: names of weights and hooks stay.
            block.__class__ = FastBlock
            block.causal = getattr(tower, "attn_mask", None) is not None
            block.pools = block is blocks[-1] and _pools_first(tower)
            own = kernels_available(block.attn.in_proj_weight) if kernels is None else kernels
            block.kernels = own and block.attn.head_dim in WIDTHS
            block.fuses_gelu = own and _has_gelu(block.mlp)


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


def _has_gelu(layers: Any) -> bool:
    """Whether an MLP is one that `mlp` computes."""
    first, activation, last = layers if len(layers) == 3 else (None, None, None)
    return (
        type(first) is type(last) is nn.Linear
        and type(activation) is nn.GELU
        and activation.approximate == "none"
        and first.bias is not None is not last.bias
        and first.out_features % COLUMNS == 0
    )


def _pools_first(tower: Any) -> bool:
    """Whether a tower needs only its transformer's first token, after a change here of texts'."""
    if isinstance(tower, VisionTransformer):
        return tower.pool_type == "tok" and tower.attn_pool is None and not tower.output_tokens
    if not hasattr(tower, "lengths") or getattr(tower, "output_tokens", False):
        return False
    if tower.transformer.grad_checkpointing:  # open_clip's own, in the forward pass of its class
        return False
    tower.transformer.__class__ = PoolingTransformer
    tower.transformer.lengths = tower.lengths
    setattr(tower, "text_pool_type" if isinstance(tower, CLIP) else "pool_type", "first")
    return True


class PoolingTransformer(Transformer):  # type: ignore[misc, unused-ignore]
    """A text tower's transformer, whose output is that of each text's last token, (n, 1, width).

    Attributes:
        tokens: the texts, set before each call.
        lengths: tells where they end.
    """

    tokens: Tensor
    lengths: Callable[[Tensor], Tensor]

    def forward(self, x: Tensor, attn_mask: Any = None) -> Any:
        """See above; x is (n, length, width)."""
        *blocks, last = self.resblocks
        for block in blocks:
            x = block(x)
        return last(x, at=self.lengths(self.tokens) - 1)


class FastBlock(ResidualAttentionBlock):  # type: ignore[misc, unused-ignore]
    """A block whose queries, keys and values are views of one product.

    `nn.MultiheadAttention` swaps batch and sequence and copies each of the three. And it adds the
    causal mask to the logits, which fewer kernels can do than leave out what it hides.

    Attributes:
        causal: whether tokens see only those before them.
        pools: whether only one token of each sequence goes on: the rest of the last block's outputs
            would have no use.
        kernels: whether attention is by kernels of our own, unless sequences are long.
        fuses_gelu: whether GELU is, in 16 bits.
    """

    causal: bool
    pools: bool
    kernels: bool
    fuses_gelu: bool

    def forward(
        self,
        q_x: Tensor,
        k_x: None = None,
        v_x: None = None,
        attn_mask: Any = None,
        at: Tensor | None = None,
    ) -> Tensor:
        """The block's output, like q_x (n, length, width), or if it pools, (n, 1, width).

        Args:
            q_x: queries, keys and values before the first norm.
            k_x, v_x, attn_mask: open_clip's; unused. Graphs that used a mask would be compiled anew
                for some shapes of it.
            at: if it pools, the place of each sequence's token, int64 (n,), which sees those before
                it; None: the first one, which sees all.
        """
        weight, bias, out = self.attn.in_proj_weight, self.attn.in_proj_bias, self.attn.out_proj
        heads, width = (self.attn.num_heads, self.attn.head_dim), q_x.shape[2]
        if self.pools:
            kv = F.linear(self.ln_1(q_x), weight[width:], bias[width:])
            k, v = kv.unflatten(-1, (2, *heads)).unbind(2)
            first = q_x[:, :1]
            q_x = first if at is None else q_x.gather(1, at[:, None, None].expand_as(first))
            q = F.linear(self.ln_1(q_x), weight[:width], bias[:width]).unflatten(-1, heads)
            mixed = _attention_of_one(q, k, v, at)
        else:
            # Plans count blocks that are not compiled; there a name would keep qkv alive.
            mixed = self._attention(
                F.linear(self.ln_1(q_x), weight, bias).unflatten(-1, (3, *heads))
            )
        x: Tensor = q_x + self.ls_1(out(mixed.flatten(2)))
        return x + self.ls_2(self._mlp(self.ln_2(x)))

    def _mlp(self, x: Tensor) -> Tensor:
        """The MLP's output, like x."""
        first, _, last = self.mlp
        kind, dtype = x.device.type, x.dtype
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
        # Other layers may have come since, such as those with products in float8.
        if not (self.fuses_gelu and dtype.itemsize == 2 and type(first) is type(last) is nn.Linear):
            plain: Tensor = self.mlp(x)
            return plain
        of_first, of_last = ((p.weight.to(dtype), p.bias.to(dtype)) for p in (first, last))
        return mlp(x.to(dtype), of_first, of_last)

    def _attention(self, qkv: Tensor) -> Tensor:
        """Attention (n, length, heads, width of a head) within each sequence."""
        if self.kernels and qkv.shape[1] <= LONGEST and qkv.element_size() == 2:
            if qkv.shape[1] > SHORT:
                blocked: Tensor = block_attention(qkv, self.causal)[0]
                return blocked
            mixed: Tensor = short_attention(qkv, self.causal)
            return mixed
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))
        return F.scaled_dot_product_attention(q, k, v, is_causal=self.causal).transpose(1, 2)


def _attention_of_one(q: Tensor, k: Tensor, v: Tensor, last: Tensor | None) -> Tensor:
    """Attention of one query, (n, 1, heads, width), to keys up to `last` (n,); None: to all.

    torch's kernels compute whole tiles of queries. These operations are bound by reading k and v,
    and torch.compile makes a kernel or two of them. As there, sums and logits are in float32.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    logits = (q.to(wide) * k).sum(-1) * k.shape[-1] ** -0.5
    if last is not None:
        hidden = torch.arange(k.shape[1], device=k.device) > last[:, None]
        logits = logits.masked_fill(hidden[..., None], -torch.inf)
    return (logits.softmax(1)[..., None] * v).sum(1, keepdim=True).to(q.dtype)
