"""Functions registered with torch, so that whatever traces a program takes each as one node."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from megabatch.torch_internals import transforms_active

_PLAIN = (Tensor, nn.Parameter)


class Operator:
    """`torch.ops.megabatch.<name>`, and a short way into it where nothing traces.

    torch's dispatcher takes a custom operator through half a dozen Python frames each way: 0.2 ms
    of host time a step (1,024 pairs on one H200: 1.37 ms instead of 1.59), which a small batch
    waits for. Plain tensors outside of `torch.compile` go straight to the function.

    The transforms of `torch.func` take an operator where reverse mode suffices (`grad`, `vjp`,
    `jacrev`); `vmap` calls it once for each entry, if `alone`: no other process takes part.
    """

    def __init__(self, name: str, function: Callable[..., Any], alone: bool) -> None:
        self.name, self.function, self.alone = name, function, alone
        self.custom = torch.library.custom_op(f"megabatch::{name}", function, mutates_args=())
        self.custom.register_vmap(self._vmap)
        self.traced = getattr(torch.ops.megabatch, name).default
        self.register_autograd(self._refuse, lambda ctx, inputs, output: None)
        self._differentiable = False

    def register_fake(self, fake: Callable[..., Any]) -> Callable[..., Any]:
        """See `torch.library.CustomOpDef.register_fake`."""
        self.custom.register_fake(fake)
        return fake

    def register_autograd(
        self, backward: Callable[..., Any], setup_context: Callable[..., None]
    ) -> None:
        """See `torch.library.CustomOpDef.register_autograd`; differentiable once."""
        self.custom.register_autograd(backward, setup_context=setup_context)
        self._differentiable = True
        function, vmap, refuse_jvp = self.function, self._vmap, self._refuse_jvp

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

            @staticmethod
            def jvp(ctx: FunctionCtx, *tangents: Any) -> NoReturn:
                refuse_jvp()

        class Transformed(Direct):
            """As transforms want it."""

            @staticmethod
            def forward(*inputs: Any) -> Any:
                return function(*inputs)

            @staticmethod
            def setup_context(ctx: FunctionCtx, inputs: tuple[Any, ...], output: Any) -> None:
                setup_context(ctx, inputs, output)

            @staticmethod
            def vmap(info: Any, in_dims: Sequence[int | None], *inputs: Any) -> Any:
                return vmap(info, in_dims, *inputs)

        self._direct: Callable[..., Any] = Direct.apply
        self._transformed: Callable[..., Any] = Transformed.apply

    def __call__(self, *arguments: Any) -> Any:
        """What the function returns, traced or not."""
        if torch.compiler.is_compiling() or not all(map(_is_plain, arguments)):
            return self.traced(*arguments)
        if transforms_active():
            return self._transformed(*arguments)
        # One without a derivative says so only if one is asked for (a second derivative).
        if self._differentiable or (
            torch.is_grad_enabled() and any(map(_needs_gradient, arguments))
        ):
            return self._direct(*arguments)
        return self.function(*arguments)

    def _vmap(self, info: Any, in_dims: Sequence[int | None], *arguments: Any) -> Any:
        """One call for each entry; what they return is stacked."""
        if not self.alone:
            raise NotImplementedError(
                f"megabatch {self.name}: torch.func.vmap does not take a call over several "
                "processes, which would all have to make the same; loop over the batch instead"
            )
        if info.batch_size == 0:
            raise ValueError(f"megabatch {self.name}: vmap: expected at least one entry, got 0")
        pairs = tuple(zip(arguments, in_dims, strict=True))
        # What is no tensor has None as its dimension, or a tuple of them.
        found = [
            self(*(a.select(dim, k) if isinstance(dim, int) else a for a, dim in pairs))
            for k in range(info.batch_size)
        ]
        if isinstance(found[0], Tensor):
            return torch.stack(found), 0
        stacked = tuple(map(torch.stack, zip(*found, strict=True)))
        return stacked, (0,) * len(stacked)

    def _refuse(self, ctx: Any, *gradients: Any) -> NoReturn:
        raise NotImplementedError(
            f"megabatch {self.name}: expected at most first derivatives, got a backward pass "
            "through a backward pass (create_graph=True, torch.func.hessian, a gradient penalty); "
            "megabatch.similarity.dense has the same functions for small matrices"
        )

    def _refuse_jvp(self) -> NoReturn:
        raise NotImplementedError(
            f"megabatch {self.name}: expected derivatives by reverse mode (backward, "
            "torch.func.grad, vjp, jacrev), got forward mode (torch.func.jvp, jacfwd, hessian, "
            "dual numbers)"
        )


#: Every operator by its name.
ops: Any = SimpleNamespace()


def operator(name: str, *, alone: bool = True) -> Callable[[Callable[..., Any]], Operator]:
    """Make a function that changes none of its arguments `ops.<name>`.

    `alone`: it needs no other process.
    """

    def register(function: Callable[..., Any]) -> Operator:
        made = Operator(name, function, alone)
        setattr(ops, name, made)
        return made

    return register


def _is_plain(argument: Any) -> bool:
    """Subclasses of Tensor, such as those that trace, have their say in the dispatcher alone.

    So do tensors without data, for which there is what `register_fake` was given.
    """
    return not isinstance(argument, Tensor) or (type(argument) in _PLAIN and not argument.is_meta)


def _needs_gradient(argument: Any) -> bool:
    return isinstance(argument, Tensor) and argument.requires_grad
