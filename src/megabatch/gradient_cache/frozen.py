"""Frozen parts of a model: run in the first pass, their outputs reused in the second.

A model with a locked and a trained tower (LiT) is one encoder, which the second pass calls as a
whole. During a pass each locked part has another `forward`, set on the instance: in the first pass
it records the part's outputs, in the second it returns them. The module itself stays in place, so a
model that iterates over its layers, reads their parameters or inspects their class, mode and hooks
sees no change, and hooks on the part are called in both passes.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megabatch.gradient_cache.autograd import is_from_torch
from megabatch.gradient_cache.state import RandomState, get_random_state, set_random_state
from megabatch.torch_internals import (
    COMPILED_CALL,
    forward_hooks,
    is_compiled,
    is_compiled_in_place,
    version_of,
)


class FrozenParts:
    """The largest frozen modules, inside trained ones, that return a vector per sample.

    A module is frozen if it has parameters and none requires a gradient. Only features, (rows,
    width), are recorded: a frozen stem's output for trained layers can be as large as their
    activations. A part is run again if skipping it could make a difference: its output depends on
    something trained before it, or was changed in place; its forward sets attributes, which the
    model may read; a module inside it has a hook; or the number of its calls differs between
    micro-batches.
    """

    def __init__(self, modules: list[nn.Module], devices: Iterable[torch.device]) -> None:
        self._parts = [_Part(module, set(devices)) for module in _largest_frozen(modules)]

    def __bool__(self) -> bool:
        """Whether there is any."""
        return bool(self._parts)

    @contextlib.contextmanager
    def first_pass(self, micro_batch: int) -> Iterator[None]:
        """Record the parts' outputs; the graph of micro-batch 0 shows which parts are constant."""
        with contextlib.ExitStack() as stack:
            for part in self._parts:
                stack.enter_context(part.recording(micro_batch))
            yield

    @contextlib.contextmanager
    def second_pass(self, micro_batch: int) -> Iterator[None]:
        """Return each recorded output, once, instead of running the parts."""
        with contextlib.ExitStack() as stack:
            for part in self._parts:
                stack.enter_context(part.replaying(micro_batch))
            yield


@dataclass
class _Call:
    """An output, with the random state and the tensor's version right after the call."""

    output: Tensor
    version: int
    random_state: RandomState


class _Part:
    """A frozen module with its outputs in the first pass, by micro-batch and in order."""

    def __init__(self, module: nn.Module, devices: set[torch.device]) -> None:
        self.module = module
        self.devices = devices
        self.constant = True
        self.calls: dict[int, list[_Call]] = {}

    @contextlib.contextmanager
    def recording(self, micro_batch: int) -> Iterator[None]:
        """Record the outputs inside, unless the part is known not to be constant."""
        if not self.constant:
            yield
            return
        calls = self.calls[micro_batch] = []
        # Attributes are compared in one micro-batch only: a forward pass sets them in all or none.
        before = _attributes(self.module) if micro_batch == 0 else None
        with _forward_replaced(self.module, functools.partial(self._record, calls)):
            yield
        changed = before is not None and not _same(before, _attributes(self.module))
        if self.constant and (changed or len(calls) != len(self.calls[0])):
            self._drop()

    @contextlib.contextmanager
    def replaying(self, micro_batch: int) -> Iterator[None]:
        """Return the recorded outputs instead of computing them."""
        calls = self.calls.pop(micro_batch, [])
        if not calls:
            yield
            return
        with _forward_replaced(self.module, functools.partial(self._replay, calls)):
            yield

    def _record(
        self, calls: list[_Call], forward: Callable[..., Any], *args: Any, **kw: Any
    ) -> Any:
        output = forward(*args, **kw)
        features = isinstance(output, Tensor) and output.ndim == 2 and not output.requires_grad
        if features and not output.is_inference():  # inference tensors do not count changes
            calls.append(_Call(output, version_of(output), get_random_state(self.devices)))
        else:
            self._drop()
        return output

    def _replay(
        self, calls: list[_Call], forward: Callable[..., Any], *args: Any, **kw: Any
    ) -> Any:
        call = calls.pop(0) if calls else None
        if call is None or version_of(call.output) != call.version:
            return forward(*args, **kw)
        set_random_state(call.random_state)  # as after the part's own random numbers
        return call.output

    def _drop(self) -> None:
        """Run the part in the second pass, like any other module."""
        self.constant = False
        self.calls.clear()


@contextlib.contextmanager
def _forward_replaced(module: nn.Module, function: Callable[..., Any]) -> Iterator[None]:
    """Redirect this thread's calls of the module inside to `function(forward, *args, **kwargs)`.

    For a module compiled in place, the compiled call is replaced: another `forward` would make
    torch.compile compile it again.
    """
    name = COMPILED_CALL if is_compiled_in_place(module) else "forward"
    forward, thread, own = getattr(module, name), threading.get_ident(), vars(module)

    @functools.wraps(forward)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != thread:
            return forward(*args, **kwargs)
        return function(forward, *args, **kwargs)

    own_before = {name: own[name]} if name in own else {}
    own[name] = replacement  # not by setattr, which wrappers pass on to the module inside
    try:
        yield
    finally:
        if own.get(name) is replacement:
            del own[name]
            own.update(own_before)


def _largest_frozen(modules: list[nn.Module]) -> list[nn.Module]:
    """Frozen children of other modules, except those that cannot be skipped unnoticed."""
    parameters = [p for module in modules for p in module.parameters(recurse=False)]
    if all(parameter.requires_grad for parameter in parameters):
        return []
    not_called = _not_called_themselves(modules)
    parts = [
        child
        for parent in modules
        if parent not in not_called and not _frozen(parent)
        for child in parent.children()
        if _frozen(child) and not _has_hooks_inside(child)
    ]
    return list(dict.fromkeys(parts))


def _frozen(module: nn.Module) -> bool:
    found = False
    for parameter in module.parameters():
        if parameter.requires_grad:
            return False
        found = True
    return found


def _not_called_themselves(modules: list[nn.Module]) -> set[nn.Module]:
    """Modules that run in another form: compiled with their parent, or as copies in threads."""
    roots = (
        module for module in modules if is_compiled(module) or isinstance(module, nn.DataParallel)
    )
    return {inner for root in roots for inner in root.modules()}


def _has_hooks_inside(part: nn.Module) -> bool:
    """Whether skipping the part's forward (or compiled call) would skip a user's hook.

    PyTorch's own hooks, such as FSDP2's, only serve that forward pass.
    """
    compiled = is_compiled_in_place(part)
    return any(
        not is_from_torch(hook)
        for module in part.modules()
        if module is not part or compiled
        for hook in forward_hooks(module)
    )


def _attributes(part: nn.Module) -> list[dict[str, Any]]:
    """The attributes of all modules of a part, with the members of containers.

    Parameters are left out: FSDP2 exchanges them during a forward pass.
    """
    return [
        {name: _members(value) for name, value in vars(module).items() if name != "_parameters"}
        for module in part.modules()
    ]


def _members(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [value, *value.keys(), *value.values()]
    return [value, *value] if isinstance(value, (list, tuple, set)) else [value]


def _same(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> bool:
    """Whether all attributes are the same objects, or equal numbers or strings."""
    return len(before) == len(after) and all(
        old.keys() == new.keys()
        and all(
            len(values) == len(new[name]) and all(map(_identical, values, new[name]))
            for name, values in old.items()
        )
        for old, new in zip(before, after, strict=True)
    )


def _identical(old: Any, new: Any) -> bool:
    return old is new or (
        isinstance(old, (int, float, str)) and type(old) is type(new) and old == new
    )
