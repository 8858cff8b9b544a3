"""Functions registered with torch, so that whatever traces a program takes each as one node."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

_PLAIN = (Tensor, nn.Parameter)


class Operator:
    """`torch.ops.megabatch.<name>`, and a short way into it where nothing traces.

    torch's dispatcher takes a custom operator through half a dozen Python frames each way: 0.2 ms
    of host time a step (1,024 pairs on one H200: 1.37 ms instead of 1.59), which a small batch
    waits for. Plain tensors outside of `torch.compile` go straight to the function.
    """

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self.function = function
        self.custom = torch.library.custom_op(f"megabatch::{name}", function, mutates_args=())
        self.traced = getattr(torch.ops.megabatch, name).default
        self._direct: Callable[..., Any] | None = None

    def register_fake(self, fake: Callable[..., Any]) -> Callable[..., Any]:
        """See `torch.library.CustomOpDef.register_fake`."""
        self.custom.register_fake(fake)
        return fake

    def register_autograd(
        self, backward: Callable[..., Any], setup_context: Callable[..., None]
    ) -> None:
        """See `torch.library.CustomOpDef.register_autograd`; differentiable once."""
        self.custom.register_autograd(backward, setup_context=setup_context)
        function = self.function

        class Direct(torch.autograd.Function):
            # Not with a `setup_context` of its own, for which torch binds the signature each time.
            @staticmethod
            def forward(ctx: FunctionCtx, *inputs: Any) -> Any:
                output = function(*inputs)
                setup_context(ctx, inputs, output)
                return output

            @staticmethod
            def backward(ctx: FunctionCtx, *gradients: Any) -> Any:
                return backward(ctx, *gradients)

        self._direct = Direct.apply

    def __call__(self, *arguments: Any) -> Any:
        """What the function returns, traced or not."""
        if torch.compiler.is_compiling() or not all(map(_is_plain, arguments)):
            return self.traced(*arguments)
        if self._direct is not None:
            return self._direct(*arguments)
        # An operator without a derivative says so where one is asked for (a second derivative).
        if torch.is_grad_enabled() and any(map(_needs_gradient, arguments)):
            return self.traced(*arguments)
        return self.function(*arguments)


#: Every operator by its name.
ops: Any = SimpleNamespace()


def operator(name: str) -> Callable[[Callable[..., Any]], Operator]:
    """Make a function that changes none of its arguments `ops.<name>`."""

    def register(function: Callable[..., Any]) -> Operator:
        made = Operator(name, function)
        setattr(ops, name, made)
        return made

    return register


def _is_plain(argument: Any) -> bool:
    """Subclasses of Tensor, such as those that trace, have their say in the dispatcher alone."""
    return not isinstance(argument, Tensor) or type(argument) in _PLAIN


def _needs_gradient(argument: Any) -> bool:
    return isinstance(argument, Tensor) and argument.requires_grad
