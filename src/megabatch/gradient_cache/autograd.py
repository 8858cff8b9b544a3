"""The autograd node of a step's loss, questions to autograd's graph, and sums of gradients."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from megabatch.torch_internals import accumulation_hooks, tensor_hooks, version_of, will_execute

#: From the loss's gradient, and autograd's node of each input, to the inputs' gradients.
Backward: TypeAlias = Callable[[Tensor, Sequence[Any]], Sequence["Tensor | None"]]


def attach(value: Tensor, inputs: Sequence[Tensor], backward: Backward) -> Tensor:
    """Return a tensor of this value whose backward pass is `backward`, with these inputs.

    On a GPU autograd would run it in a thread of its own, where Ctrl-C has to wait for the whole
    second pass. So there are two nodes: one on the loss's device passes the gradient on, and one on
    the CPU runs `backward`, in the thread that called `.backward()`.
    """
    if not inputs:  # all gradients bypass the node
        inputs = [torch.zeros((), requires_grad=True)]
    box: list[Tensor] = []  # hands the upstream gradient from the first node to the second
    result: Tensor = _OnDevice.apply(_OnHost.apply(box, backward, *inputs), value.detach(), box)
    return result


class _Node(torch.autograd.Function):
    @staticmethod
    def _compiled_autograd_key(ctx: Any) -> Any:
        """Refuse compiled autograd, which would compile the second pass into its graph."""
        raise RuntimeError(
            "GradientCache: compiled autograd cannot compile the second pass of a step; "
            "call loss.backward() outside it"
        )


class _OnDevice(_Node):
    @staticmethod
    def forward(ctx: Any, host: Tensor, value: Tensor, box: list[Tensor]) -> Tensor:
        ctx.box = box
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        ctx.box[:] = upstream
        return _scalar_on_host(), None, None


class _OnHost(_Node):
    @staticmethod
    def forward(ctx: Any, box: list[Tensor], backward: Backward, *inputs: Tensor) -> Tensor:
        ctx.box, ctx.function = box, backward
        return _scalar_on_host()

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        nodes = [node for node, _ in ctx.next_functions]
        return None, None, *ctx.function(ctx.box.pop(), nodes)


def _scalar_on_host() -> Tensor:
    return torch.zeros((), device="cpu", dtype=torch.float32)


def reached_from(outputs: Iterable[Tensor]) -> tuple[dict[int, Tensor], bool]:
    """Follow the graph of `outputs` to its leaves.

    Returns:
        The leaves by id, and whether the graph has a reentrant checkpoint, whose backward pass
        starts another one: torch.autograd.grad is not possible, and leaves behind it are invisible.
    """
    outputs = [*outputs]
    leaves = {id(t): t for t in outputs if t.grad_fn is None and t.requires_grad}
    reentrant = False
    seen: set[Any] = {None}
    stack: list[Any] = [output.grad_fn for output in outputs]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            leaves[id(leaf)] = leaf
        if isinstance(node, BackwardCFunction):
            reentrant |= type(node).__name__ == "CheckpointFunctionBackward"
        stack.extend(function for function, _ in node.next_functions)
    return leaves, reentrant


def is_accumulated(node: Any) -> bool:
    """Whether the running backward pass accumulates into `.grad` of this leaf's node.

    It does not if `torch.autograd.grad` asks for the gradient, or `inputs=` leaves it out.
    """
    try:
        return will_execute(node)
    except RuntimeError:  # raised for a leaf that torch.autograd.grad asks for
        return False


def add_to_grad(leaf: Tensor, gradient: Tensor | None) -> None:
    """Add to `.grad` without calling hooks: DDP's would reduce it now."""
    if gradient is not None and leaf.grad is not None:
        leaf.grad.add_(gradient)
    elif gradient is not None:
        leaf.grad = gradient


class GradientSums:
    """For each of a node's inputs, the sum of its gradients so far.

    A hook takes a leaf's gradient as soon as it is computed, so that a micro-batch's whole gradient
    is never in memory beside the sum, which alone the leaf's own hooks see. Under accumulation
    gradients are added to the existing `.grad`, also to save memory, and the node returns an
    expanded zero; unless the leaf has a hook, which would see the zero.
    """

    def __init__(self, inputs: Sequence[Tensor], accumulated: Sequence[bool]) -> None:
        """`accumulated`: for each input, whether its gradient goes to `.grad`."""
        self._inputs = {id(tensor): tensor for tensor in inputs}
        self._in_place = {
            id(tensor)
            for tensor, to_grad in zip(inputs, accumulated, strict=False)
            if to_grad and tensor.grad is not None
            if _is_plain(tensor.grad) and not tensor.grad.requires_grad and not tensor_hooks(tensor)
        }
        self._sums: dict[int, Tensor] = {}

    def __contains__(self, tensor: Tensor) -> bool:
        """Whether the tensor is one of the inputs."""
        return id(tensor) in self._inputs

    def add_from(
        self,
        outputs: Sequence[Tensor],
        upstream: Sequence[Tensor],
        tensors: Iterable[Tensor],
        wanted: Sequence[Tensor] = (),
    ) -> list[Tensor | None]:
        """Backpropagate through the graph of `outputs`, and add the gradients of `tensors`.

        Returns:
            The gradients of `wanted`, None for those that got none.
        """
        tensors = [tensor for tensor in tensors if tensor.requires_grad]
        known = [tensor for tensor in tensors if tensor in self]
        others = [tensor for tensor in tensors if tensor not in self]
        with contextlib.ExitStack() as stack:
            for leaf in known:
                stack.enter_context(_only_hook(leaf, functools.partial(self._take, leaf)))
            gradients = torch.autograd.grad(
                outputs, [*known, *others, *wanted], upstream, allow_unused=True
            )[len(known) :]
        for tensor, gradient in zip(others, gradients, strict=False):
            self.add(tensor, gradient)
        return list(gradients[len(others) :])

    def add(self, tensor: Tensor, gradient: Tensor | None) -> None:
        """Add a gradient: of anything else than the inputs to `.grad`."""
        if gradient is None or tensor not in self:
            add_to_grad(tensor, gradient)
            return
        key = id(tensor)
        total = tensor.grad if key in self._in_place else self._sums.get(key)
        if total is None and _is_plain(gradient) and tensor.layout is torch.strided:
            # The gradient may be shared (of a + b) or expanded. In this layout autograd takes it.
            total = torch.empty_like(tensor, dtype=gradient.dtype).copy_(gradient)
        elif total is None:
            total = gradient.clone()
        elif _is_plain(total):
            total.add_(gradient)
        else:
            total = total + gradient
        self._sums[key] = total

    def results(self) -> list[Tensor | None]:
        """Return the node's gradient for each input; None for those that got none."""
        sums, self._sums = self._sums, {}
        for key in self._in_place & sums.keys():
            sums[key] = _zero(sums[key])
        return [sums.get(key) for key in self._inputs]

    def _take(self, leaf: Tensor, gradient: Tensor) -> Tensor | None:
        self.add(leaf, gradient)
        return _zero(gradient) if _is_plain(gradient) else None


def _zero(like: Tensor) -> Tensor:
    """A zero of this shape in the memory of one number."""
    return like.new_zeros(()).expand(like.shape)


def _is_plain(tensor: Tensor) -> bool:
    """Whether the tensor is neither sparse nor of a subclass such as DTensor."""
    return type(tensor) is Tensor and tensor.layout is torch.strided


@contextlib.contextmanager
def _only_hook(leaf: Tensor, hook: Callable[[Tensor], Tensor | None]) -> Iterator[None]:
    """Call this hook on the leaf's gradient inside, and none of its own."""
    own = {**(tensor_hooks(leaf) or {})}
    handle = leaf.register_hook(hook)
    hooks: Any = tensor_hooks(leaf)  # autograd holds this very dictionary
    for key in own:
        del hooks[key]
    try:
        yield
    finally:
        handle.remove()
        hooks.update(own)


def call_hooks_only_with_gradient(leaf: Tensor) -> None:
    """Let the hooks of a leaf that gets no gradient here be called only if it gets another one.

    Autograd calls the hooks of all inputs of a node, also where the node gives no gradient: those
    of the tensor with None, and those after accumulation. PyTorch's own may count such calls.
    """
    before = leaf.grad, None if leaf.grad is None else version_of(leaf.grad)

    def call(hooks: dict[int, Any], key: int, hook: Any, argument: Tensor | None) -> Any:
        hooks[key] = hook  # from now on as ever
        now = leaf.grad, None if leaf.grad is None else version_of(leaf.grad)
        unchanged = now[0] is before[0] and now[1] == before[1]
        none = unchanged if argument is leaf else argument is None
        return None if none else hook(argument)

    for hooks in (tensor_hooks(leaf), accumulation_hooks(leaf)):
        for key, hook in [*(hooks or {}).items()]:
            module = getattr(hook, "__module__", None) or type(hook).__module__
            if hooks and module.split(".")[0] != "torch":  # autograd holds this very dictionary
                hooks[key] = functools.partial(call, hooks, key, hook)
