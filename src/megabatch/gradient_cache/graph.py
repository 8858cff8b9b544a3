"""Questions to autograd: which leaves a graph leads to, and what a running backward pass does."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.autograd.function import BackwardCFunction

from megabatch.torch_internals import tensor_hooks, will_execute


@dataclass
class Reached:
    """What a graph leads to.

    leaves: tensors that would get a gradient, by id.
    reentrant: whether it has a reentrant checkpoint in it, whose backward pass starts another one:
    leaves behind it are not seen, and torch.autograd.grad is not possible.
    """

    leaves: dict[int, Tensor] = field(default_factory=dict)
    reentrant: bool = False


def reached_from(outputs: Iterable[Tensor], but_not_beyond: Iterable[Tensor] = ()) -> Reached:
    """Follow the graph of `outputs` to its leaves, or to the given tensors in it."""
    found = Reached()
    seen: set[Any] = {None, *(tensor.grad_fn for tensor in but_not_beyond)}
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
    """Whether the backward pass that is running adds to the `.grad` that belongs to a leaf's node.

    It does not where `torch.autograd.grad` asks for the gradient, or `inputs=` leaves it out.
    """
    try:
        return will_execute(node)
    except RuntimeError:  # its answer for a leaf that torch.autograd.grad asks for
        return False


def set_hooks_aside(tensor: Tensor, *, but: int) -> dict[int, Any]:
    """Take the hooks of `Tensor.register_hook` off a tensor, but for the one of that id.

    Returns:
        What `put_hooks_back` takes.
    """
    hooks: Any = tensor_hooks(tensor)  # autograd holds this very dictionary
    aside = {key: hook for key, hook in hooks.items() if key != but}
    for key in aside:
        del hooks[key]
    return aside


def put_hooks_back(tensor: Tensor, aside: dict[int, Any]) -> None:
    """Undo `set_hooks_aside`; hooks are called in the order in which they were registered."""
    if aside:
        hooks: Any = tensor_hooks(tensor)
        everything = dict(sorted({**hooks, **aside}.items()))
        hooks.clear()
        hooks.update(everything)
