"""The autograd node of a step's loss, and questions to autograd's graph and its backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from megabatch.torch_internals import (
    accumulation_hooks,
    tensor_hooks,
    version_of,
    will_execute,
)


class Backward(Protocol):
    """The backward function of a loss's node."""

    def __call__(self, upstream: Tensor, nodes: Sequence[Any]) -> Sequence[Tensor | None]:
        """Return the gradients of the node's inputs; `nodes`: autograd's node of each input."""


def attach(value: Tensor, inputs: Sequence[Tensor], backward: Backward) -> Tensor:
    """Return a tensor of this value whose backward pass is `backward`, with these inputs.

    It consists of two nodes. The one next to the loss has the loss's device, so on a GPU autograd
    runs its backward pass in another thread, where Python handles no signal, while the main thread
    waits: Ctrl-C would wait for the whole second pass. The second node is on the CPU, where
    backward passes run in the thread that called `.backward()`.
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


@dataclass
class Reached:
    """The leaves of a graph.

    leaves: tensors that would get a gradient, by id.
    reentrant: whether the graph has a reentrant checkpoint, whose backward pass starts another one:
    leaves behind it are not visible, and torch.autograd.grad is not possible.
    """

    leaves: dict[int, Tensor] = field(default_factory=dict)
    reentrant: bool = False


def reached_from(outputs: Iterable[Tensor], stop_at: Iterable[Tensor] = ()) -> Reached:
    """Follow the graph of `outputs` to its leaves, or to the tensors of `stop_at`."""
    found = Reached()
    seen: set[Any] = {None, *(tensor.grad_fn for tensor in stop_at)}
    stack = []
    for output in outputs:
        if output.grad_fn is not None:
            stack.append(output.grad_fn)
        elif output.requires_grad:
            found.leaves[id(output)] = output
    while stack:
        node: Any = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if not node.next_functions:
            leaf = getattr(node, "variable", None)
            if leaf is not None:
                found.leaves[id(leaf)] = leaf
            continue
        if isinstance(node, BackwardCFunction):
            found.reentrant |= type(node).__name__ == "CheckpointFunctionBackward"
        stack.extend(function for function, _ in node.next_functions)
    return found


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
    if gradient is None:
        return
    if leaf.grad is None:
        leaf.grad = gradient
    else:
        leaf.grad.add_(gradient)


def set_hooks_aside(tensor: Tensor, *, but: int) -> dict[int, Any]:
    """Remove a tensor's hooks (`Tensor.register_hook`), except the one with id `but`.

    Returns:
        The removed hooks, for `put_hooks_back`.
    """
    hooks: Any = tensor_hooks(tensor)  # autograd holds this very dictionary
    aside = {key: hook for key, hook in hooks.items() if key != but}
    for key in aside:
        del hooks[key]
    return aside


def put_hooks_back(tensor: Tensor, aside: dict[int, Any]) -> None:
    """Undo `set_hooks_aside`, keeping the order in which hooks were registered."""
    if aside:
        hooks: Any = tensor_hooks(tensor)
        everything = dict(sorted({**hooks, **aside}.items()))
        hooks.clear()
        hooks.update(everything)


def is_from_torch(hook: Callable[..., Any]) -> bool:
    """Whether a hook is PyTorch's own."""
    module = getattr(hook, "__module__", None) or type(hook).__module__
    return module.split(".")[0] == "torch"


def spare_hooks(leaf: Tensor) -> None:
    """Let a leaf's hooks be called only if it gets a gradient.

    Autograd calls those of all inputs of a node, also where the node gives no gradient. Hooks keep
    their handles, and do the same as before otherwise. PyTorch's own may count such calls.
    """
    for hooks, kind in ((tensor_hooks(leaf), _IfDefined), (accumulation_hooks(leaf), _IfAdded)):
        for key, hook in [*(hooks or {}).items()]:
            inner = hook.hook if isinstance(hook, kind) else hook
            if hooks and not is_from_torch(inner):  # autograd holds this very dictionary
                hooks[key] = kind(inner, leaf)


class _IfDefined:
    """A hook of `Tensor.register_hook`, called with a gradient only."""

    def __init__(self, hook: Any, leaf: Tensor) -> None:
        self.hook = hook

    def __call__(self, gradient: Tensor | None) -> Tensor | None:
        return None if gradient is None else self.hook(gradient)


class _IfAdded:
    """A hook after accumulation, called only if `.grad` has changed since this object was made."""

    def __init__(self, hook: Any, leaf: Tensor) -> None:
        self.hook = hook
        self.before: tuple[Tensor | None, int] | None = _with_version(leaf.grad)

    def __call__(self, leaf: Tensor) -> None:
        before, self.before = self.before, None
        gradient, version = _with_version(leaf.grad)
        if before is None or gradient is not before[0] or version != before[1]:
            self.hook(leaf)


def _with_version(tensor: Tensor | None) -> tuple[Tensor | None, int]:
    return tensor, 0 if tensor is None else version_of(tensor)
