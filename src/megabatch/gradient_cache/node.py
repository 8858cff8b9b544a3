"""The autograd node that a step's loss comes from.

It is two nodes in a row. The one next to the loss has the loss's device, so on a GPU autograd calls
its backward pass in a thread of its own, where no signal reaches Python and which the main thread
waits for: Ctrl-C would wait for the whole second pass. The second node is on the CPU, whose
backward passes run in the thread that called `.backward()`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor


class Replay(Protocol):
    """What a node does when its loss is backpropagated."""

    def __call__(self, upstream: Tensor, nodes: Sequence[Any]) -> Sequence[Tensor | None]:
        """The gradients of the node's inputs; `nodes`: autograd's, one for each input."""


def attach(value: Tensor, inputs: Sequence[Tensor], replay: Replay) -> Tensor:
    """A tensor of this value whose backward pass gives `inputs` the gradients of `replay`."""
    if not inputs:  # all gradients go past the node
        inputs = [torch.zeros((), requires_grad=True)]
    handed: list[Tensor] = []
    result: Tensor = _OnDevice.apply(_OnHost.apply(handed, replay, *inputs), value.detach(), handed)
    return result


class _Node(torch.autograd.Function):
    @staticmethod
    def _compiled_autograd_key(ctx: Any) -> Any:
        """Called by compiled autograd, which would compile the second pass into its graph."""
        raise RuntimeError(
            "GradientCache: compiled autograd cannot compile the second pass of a step; "
            "call loss.backward() outside it"
        )


class _OnDevice(_Node):
    @staticmethod
    def forward(ctx: Any, host: Tensor, value: Tensor, handed: list[Tensor]) -> Tensor:
        ctx.handed = handed
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        ctx.handed[:] = upstream
        return _number_on_host(), None, None


class _OnHost(_Node):
    @staticmethod
    def forward(ctx: Any, handed: list[Tensor], replay: Replay, *inputs: Tensor) -> Tensor:
        ctx.handed, ctx.replay = handed, replay
        return _number_on_host()

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        nodes = [node for node, _ in ctx.next_functions]
        return None, None, *ctx.replay(ctx.handed.pop(), nodes)


def _number_on_host() -> Tensor:
    return torch.zeros((), device="cpu", dtype=torch.float32)
