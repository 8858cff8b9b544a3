"""The repeated blocks of a model, the units of sharding, checkpointing and compilation."""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable, Collection
from inspect import ismethod
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from megabatch.models.images import PatchConvolution, PixelNormalization
from megabatch.models.towers import Tower, tower_of
from megabatch.torch_internals import (
    configure_compiler,
    draw_random_numbers_as_uncompiled,
    mark_compiled_in_place,
)


def blocks(module: nn.Module) -> list[nn.Module]:
    """The blocks of a transformer or residual network; in a model without any, its towers.

    Blocks are composite modules of one class that a list or sequence repeats.
    """
    return [block for members in _lists_of_blocks(module).values() for block in members]


def use_fast_blocks(module: nn.Module, *, kernels: bool | None = None) -> None:
    """Give transformers a faster forward pass in place; weights and features stay.

    open_clip's get other blocks, and those of the library transformers other attention. Call this
    before the functions below, which wrap the blocks' forward passes.

    Args:
        module: the model, with the interface of `Towers.module`.
        kernels: whether attention is by Triton kernels, unless sequences are long; default: as the
            weights' device has them.
    """
    if "open_clip" in sys.modules:  # else it is another model, and the import takes seconds
        from megabatch.models.fast_blocks import replace_blocks

        replace_blocks(module, kernels)
    if "transformers.modeling_utils" in sys.modules:
        try:
            from megabatch.models.text_attention import use_short_attention
        except ImportError:  # Triton is missing, or transformers has no registries yet
            return
        use_short_attention(module, kernels)


def with_fast_blocks(module: nn.Module, *, kernels: bool) -> nn.Module:
    """A copy of a model with its weights, after `use_fast_blocks`, which leaves others as is."""
    known = ("open_clip.", "transformers.")
    if not any(type(part).__module__.startswith(known) for part in module.modules()):
        return module
    shared = [*module.parameters(), *module.buffers()]
    module = copy.deepcopy(module, {id(tensor): tensor for tensor in shared})
    use_fast_blocks(module, kernels=kernels)
    return module


def checkpoint_activations(module: nn.Module) -> None:
    """Keep only the blocks' inputs for the backward pass, which recomputes the rest."""
    for block in blocks(module):
        forward: Callable[..., object] = block.forward
        block.forward = functools.partial(checkpoint, forward, use_reentrant=False)


def compile_blocks(
    module: nn.Module, varying: Collection[Tower] = (), *, backend: str | Any = "inductor"
) -> None:
    """Compile a model's blocks and its images' first layers in place; parameters keep their names.

    The blocks of one list share their graphs: one with and one without gradients, for each shape of
    the input or, where the length of texts varies, for all shapes. Hooks, such as FSDP2's, stay
    outside. Nothing is compiled before a block is called, which raises torch.compile's errors.

    Args:
        module: the model, with the interface of `Towers.module`.
        varying: the towers that get texts of varying lengths. Their graphs take all shapes. Others
            are compiled for each shape, which makes faster kernels.
        backend: see torch.compile.
    """
    lists = _lists_of_blocks(module)
    inside = {part for members in lists.values() for block in members for part in block.modules()}
    for name, layer in module.named_modules():
        # Outside of graphs the kernels of these only copy and convert pixels.
        if isinstance(layer, (PixelNormalization, PatchConvolution)) and layer not in inside:
            lists[name] = [layer]
    of_blocks = [block.forward for members in lists.values() for block in members]
    if any(getattr(forward, "func", None) is checkpoint for forward in of_blocks):
        # Inductor's own numbers are others in a graph that computes again than in the one without
        # gradients: gradient caching's second pass would have another dropout than the first.
        draw_random_numbers_as_uncompiled()
    # Blocks that differ in a constant, such as a rate of stochastic depth, share no graphs.
    configure_compiler(8 * max(map(len, lists.values()), default=1))
    for name, members in lists.items():
        forward = _forward_of_its_own()
        compiled = torch.compile(forward, backend=backend, dynamic=tower_of(name) in varying)
        for block in members:
            # A method's function and its block: torch 2.9 compiles anew for each bound method.
            bound: Any = block.forward
            own = [bound.__func__, bound.__self__] if ismethod(bound) else [bound]
            block.forward = functools.partial(compiled, *own)
            mark_compiled_in_place(block)


def _forward_of_its_own() -> Callable[..., Any]:
    """A function that calls the one that it is given; each has a code object of its own.

    torch.compile keeps graphs by code object, counts them against a limit, and takes a size that
    changed between two of its calls for dynamic. The blocks of both towers are often of one class.
    """

    def run_block(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    run_block.__code__ = run_block.__code__.replace()
    return run_block


def _lists_of_blocks(module: nn.Module) -> dict[str, list[nn.Module]]:
    """The blocks by the name of the list that repeats them, or the towers by their names."""
    lists: dict[str, list[nn.Module]] = {}
    for name, child in module.named_modules():
        members = list(child.children())
        repeated = isinstance(child, nn.Sequential) and len(members) > 1
        if (
            (repeated or isinstance(child, nn.ModuleList))
            and len({type(member) for member in members}) == 1
            and all(map(_is_composite, members))
            and not any(name.startswith(f"{outer}.") for outer in lists)
        ):
            lists[name] = members
    towers = {name: [child] for name, child in module.named_children() if _is_composite(child)}
    return lists or towers


def _is_composite(module: nn.Module) -> bool:
    has_children = next(module.children(), None) is not None
    return has_children and next(module.parameters(), None) is not None
