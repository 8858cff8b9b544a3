"""Products of the towers' blocks in float8, by torchao."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from megabatch.errors import UsageError
from megabatch.imports import named_extras
from megabatch.models.blocks import blocks

#: A scale for each token and each output of a layer, and gradients of weights in bfloat16. So rows
#: do not depend on their micro-batch or its padding, and the number of tokens may be any.
RECIPE = "rowwise_with_gw_hp"


def float8_layers(module: nn.Module) -> dict[str, nn.Linear]:
    """The linear layers of repeated blocks by name, if their sizes are multiples of 16.

    A tower that repeats no block has none. Subclasses of `Linear` are left out, as torch's
    MultiheadAttention reads its layer's weights.
    """
    inside = {p for block in {*blocks(module)} - {*module.children()} for p in block.modules()}
    return {
        name: layer
        for name, layer in module.named_modules()
        if type(layer) is nn.Linear and layer in inside
        if layer.in_features % 16 == layer.out_features % 16 == 0
    }


def check_float8(module: nn.Module, device: torch.device) -> str:
    """A line on the share of products in float8; a UsageError if there can be none."""
    on_cpu, refused = device.type == "cpu", "--precision fp8: expected"
    if on_cpu or torch.cuda.get_device_capability(device) < (8, 9):
        got = "the CPU" if on_cpu else torch.cuda.get_device_name(device)
        raise UsageError(f"{refused} a GPU of compute capability 8.9 or later, got {got}")
    if torch.__version__ < "2.10":  # torchao 0.18 cannot be imported
        raise UsageError(f"{refused} torch 2.10 or later, got {torch.__version__}")
    with named_extras("fp8"):
        import torchao.float8  # noqa: F401
    if not (layers := float8_layers(module)):
        raise UsageError(f"{refused} repeated blocks, with linear layers in multiples of 16")
    sizes = [p.numel() for p in nn.ModuleList(blocks(module)).parameters() if p.ndim > 1]
    share = sum(layer.weight.numel() for layer in layers.values()) / sum(sizes)
    return f"products with {share:.0%} of the weights of the towers' blocks are in float8"


def use_float8(module: nn.Module, *, emulate: bool = False) -> None:
    """Replace layers in place, but not their parameters; `emulate`: on any device, in float32."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    from torchao.float8.float8_linear import Float8Linear

    layers = float8_layers(module)
    config = replace(Float8LinearConfig.from_recipe_name(RECIPE), emulate=emulate)
    convert_to_float8_training(module, module_filter_fn=lambda _, n: n in layers, config=config)
    # A class, as a forward pass of each layer's own would be compiled for each block.
    rounded = type("RoundedFloat8Linear", (_Rounded, Float8Linear), {})
    for layer in map(module.get_submodule, layers):
        layer.__class__ = rounded


class _Rounded(nn.Module):
    """Before torchao's layer among a class's bases: its inputs are contiguous, as it takes them."""

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output."""
        if not torch.is_autocast_enabled("cuda"):
            output: Tensor = super().forward(x.contiguous())
            return output
        return cast(Tensor, _Round.apply(super().forward(_Round.apply(x.bfloat16()))))


class _Round(torch.autograd.Function):
    """The identity of bfloat16, rounded also inside of torch.compile's kernels.

    They keep float32 where no backward pass needs a value: both passes of gradient caching would
    round others to float8, and features differ by 1% to 4%. They cannot leave out an integer's &.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return (x.contiguous().view(torch.int16) & -1).view(torch.bfloat16)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad
