"""Custom operators: functions that torch.compile and other tracers take as one node."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, NoReturn, TypeVar, get_args, get_type_hints

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from megabatch.torch_internals import transforms_active

Operands = TypeVar("Operands", bound=tuple[Any, ...])
Results = TypeVar("Results", bound=tuple[Any, ...])

_PLAIN = {Tensor, nn.Parameter, type(None), bool, int, str, float, tuple}


class Operator:
    """`torch.ops.megabatch.<name>`, called directly if nothing traces the call.

    torch's dispatcher takes a custom operator through half a dozen Python frames each way: 0.2 ms
    of host time a step (1,024 pairs on one H200: 1.59 ms instead of 1.37), which delays a small
    batch. Calls with plain tensors outside of `torch.compile` skip it.

    The transforms of `torch.func` work if reverse mode suffices (`grad`, `vjp`, `jacrev`). `vmap`
    calls the operator once for each entry, unless other processes take part in it.
    """

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        group_argument: int | None = None,
        schema: str | None = None,
    ) -> None:
        """`group_argument`: index of the group's name ("": this process alone) among arguments.

        schema: the signature; None: as the function's annotations say.
        """
        self.name, self.function, self.group_argument = name, function, group_argument
        self.custom = torch.library.custom_op(
            f"megabatch::{name}", function, mutates_args=(), schema=schema
        )
        self.custom.register_vmap(self._vmap)
        self.traced = getattr(torch.ops.megabatch, name).default
        self.register_autograd(self._refuse, lambda ctx, inputs, output: None)
        self._differentiable = False

    def register_fake(self, fake: Callable[..., Any]) -> Callable[..., Any]:
        """Give the operator's results for fake tensors."""
        self.custom.register_fake(fake)
        return fake

    def register_autograd(
        self, backward: Callable[..., Any], setup_context: Callable[..., None]
    ) -> None:
        """Give the operator a derivative; it is differentiable once."""
        self.custom.register_autograd(backward, setup_context=setup_context)
        self._differentiable = True
        function, vmap, refuse_jvp = self.function, self._vmap, self._refuse_jvp

        class Direct(torch.autograd.Function):
            # No separate `setup_context`, for which torch would bind the signature at each call.
            @staticmethod
            def forward(ctx: FunctionCtx, *inputs: Any) -> Any:
                output = function(*inputs)
                setup_context(ctx, inputs, output)
                return output

            @staticmethod
            def jvp(ctx: FunctionCtx, *tangents: Any) -> NoReturn:
                refuse_jvp()

        Direct.backward = staticmethod(backward)  # type: ignore[method-assign]

        class Transformed(Direct):
            """The form that `torch.func` accepts."""

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
        """Call the function, through torch's dispatcher if something traces the call."""
        if torch.compiler.is_compiling() or not _are_plain(arguments):
            return self.traced(*arguments)
        if transforms_active():
            return self._transformed(*arguments)
        # An operator without a derivative raises only if one is needed (a second derivative).
        if self._differentiable or (
            torch.is_grad_enabled() and any(map(_needs_gradient, arguments))
        ):
            return self._direct(*arguments)
        return self.function(*arguments)

    def _vmap(self, info: Any, in_dims: Sequence[int | None], *arguments: Any) -> Any:
        """Call once for each entry and stack the results."""
        if self.group_argument is not None and arguments[self.group_argument]:
            raise NotImplementedError(
                f"megabatch {self.name}: torch.func.vmap does not support calls over several "
                "processes; loop over the batch instead"
            )
        if info.batch_size == 0:
            raise ValueError(f"megabatch {self.name}: vmap: expected at least one entry, got 0")
        pairs = tuple(zip(arguments, in_dims, strict=True))
        # The dimension of an argument that is no tensor is None, or a tuple of Nones.
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
            "for small matrices, use torch operations on scale * x @ y.T"
        )

    def _refuse_jvp(self) -> NoReturn:
        raise NotImplementedError(
            f"megabatch {self.name}: expected derivatives by reverse mode (backward, "
            "torch.func.grad, vjp, jacrev), got forward mode (torch.func.jvp, jacfwd, hessian, "
            "dual numbers)"
        )


def operator(
    name: str, *, group_argument: int | None = None
) -> Callable[[Callable[..., Any]], Operator]:
    """Make an operator of a function that changes none of its arguments."""
    return lambda function: Operator(name, function, group_argument)


class Reduction(Operator, Generic[Operands, Results]):
    """The operator of a reduction, alone and over the ranks of a group.

    Operators take operands and return results flat. `<name>` takes the operands; `<name>_backward`
    the operands, the results, the upstream gradients of the differentiable results (None where
    there is none), and whether the gradient of each differentiable operand is needed: see `split`.
    """

    def __init__(
        self,
        name: str,
        operands: type[Operands],
        results: type[Results],
        functions: tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]],
        *,
        wanted: int,
        outputs: int,
    ) -> None:
        """The first `wanted` operands and the first `outputs` results are differentiable.

        Args:
            operands, results: named tuples. Operands are tensors (or None), then plain values, of
                which the last two are the group's name ("": this process alone) and the call's
                settings.
            functions: of the forward operator, of its results on fake tensors, of the backward one.
        """
        self.operands, self.results, self.wanted, self.outputs = operands, results, wanted, outputs
        self._counts = len(operands._fields), len(results._fields)  # type: ignore[attr-defined]
        fields = get_type_hints(operands)
        given = [f"{_schema(kind)} {key}" for key, kind in fields.items()]
        self._tensors = sum("Tensor" in key for key in given)
        forward, fake, backward = functions
        self._derive(name, given, get_type_hints(results), backward)
        schema = f"({', '.join(given)}) -> ({', '.join(['Tensor'] * self._counts[1])})"
        super().__init__(name, forward, len(fields) - 2, schema)
        self.register_fake(fake)
        self.register_autograd(self._autograd, self._setup_context)

    def _derive(self, name: str, given: list[str], results: Iterable[str], backward: Any) -> None:
        """Make the backward operator."""
        wanted, place = [field.split()[1] for field in given[: self.wanted]], len(given) - 2
        results = list(results)
        given = [
            *given,
            *(f"Tensor result_{key}" for key in results),
            *(f"Tensor? upstream_{key}" for key in results[: self.outputs]),
            *(f"bool needs_{key}_grad" for key in wanted),
        ]
        schema = f"({', '.join(given)}) -> ({', '.join(['Tensor'] * self.wanted)})"
        self._gradients = Operator(f"{name}_backward", backward, place, schema)
        self._gradients.register_fake(self._new_gradients)

    def split(
        self, flat: Sequence[Any]
    ) -> tuple[Operands, Results, tuple[Tensor | None, ...], tuple[bool, ...]]:
        """Operands, results, upstream gradients and needs of a call of the backward operator."""
        a, b = self._counts[0], sum(self._counts)
        c = b + self.outputs
        return self.operands(*flat[:a]), self.results(*flat[a:b]), tuple(flat[b:c]), tuple(flat[c:])

    def _new_gradients(self, *flat: Any) -> tuple[Tensor, ...]:
        needs = flat[len(flat) - self.wanted :]
        return tuple(new_gradient(t, n, flat[0]) for t, n in zip(flat, needs, strict=False))

    def _setup_context(self, ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.save_for_backward(*inputs[: self._tensors], *output)
        ctx.plain = inputs[self._tensors :]
        ctx.mark_non_differentiable(*output[self.outputs :])
        ctx.set_materialize_grads(False)

    def _autograd(self, ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        size, plain, needed = self._tensors, ctx.plain, ctx.needs_input_grad[: self.wanted]
        nothing = (None,) * (size + len(plain))
        received = upstream[: self.outputs]
        # In a group the other ranks wait for this one, whether or not its own loss used the result.
        if not plain[-2] and all(gradient is None for gradient in received):
            return nothing
        saved = ctx.saved_tensors  # read once, or activation checkpointing raises an error
        found = self._gradients(*saved[:size], *plain, *saved[size:], *received, *needed)
        pairs = zip(found, needed, strict=True)
        return *(gradient if need else None for gradient, need in pairs), *nothing[self.wanted :]


def new_gradient(tensor: Tensor | None, need: bool, like: Tensor) -> Tensor:
    """An uninitialised gradient, contiguous; empty, like `like`, if it is not needed."""
    if need and tensor is not None:
        return torch.empty_like(tensor, memory_format=torch.contiguous_format)
    return like.new_empty(0)


def _schema(kind: Any) -> str:
    plain = {Tensor: "Tensor", str: "str", bool: "bool", int: "SymInt"}
    if kind in plain:
        return plain[kind]
    return "Tensor?" if Tensor in get_args(kind) else "int[]"


def _are_plain(arguments: tuple[Any, ...]) -> bool:
    """Whether arguments, the first a tensor, can skip the dispatcher.

    Subclasses of Tensor, such as those that trace, and tensors without data cannot.
    """
    others = set(map(type, arguments)) - _PLAIN
    return not (arguments[0].is_meta or (others and any(issubclass(k, Tensor) for k in others)))


def _needs_gradient(argument: Any) -> bool:
    return isinstance(argument, Tensor) and argument.requires_grad
