"""Frozen parts of a model (LiT): run in the first pass, their outputs reused in the second.

During a pass each frozen part has another `forward`, set on the instance: in the first pass it
records the part's outputs, in the second it returns them. The module itself stays in place, so code
of the model sees no change, and hooks on the part are called in both passes.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megabatch.gradient_cache.autograd import is_from_torch
from megabatch.gradient_cache.state import RandomState
from megabatch.torch_internals import (
    COMPILED_CALL,
    forward_hooks,
    is_compiled,
    is_compiled_in_place,
    version_of,
)


class _Call(NamedTuple):
    """An output, with its version and the random state right after the call."""

    output: Tensor
    version: int
    random_state: RandomState


class FrozenParts:
    """The largest frozen modules, inside trained ones, that return a vector per sample.

    Other outputs than features, (rows, width), may be as large as activations. A part is run again
    if skipping it could make a difference: its output depends on something trained, or was changed
    in place; its forward sets attributes, which the model may read; a module inside it has a hook;
    or the number of its calls differs between micro-batches.
    """

    def __init__(self, modules: list[nn.Module], devices: Iterable[torch.device]) -> None:
        """Find them; `devices`: of the random numbers that they may draw."""
        self._devices = set(devices)
        self._calls: dict[nn.Module, list[list[_Call | None]]] = {
            part: [] for part in _largest_frozen(modules)
        }

    def __bool__(self) -> bool:
        """Whether there is any."""
        return bool(self._calls)

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """Record the parts' outputs for the next micro-batch, which is encoded inside.

        The first one needs a graph, which shows the parts that are constant.
        """
        # A forward pass sets attributes in all micro-batches or in none.
        before = {part: _attributes(part) for part, calls in self._calls.items() if not calls}
        for calls in self._calls.values():
            calls.append([])
        with self._replaced(self._record, -1):
            yield
        for part, calls in [*self._calls.items()]:
            changed = part in before and not _same(before[part], _attributes(part))
            if changed or None in calls[-1] or len(calls[-1]) != len(calls[0]):
                del self._calls[part]

    def replayed(self, micro_batch: int) -> contextlib.AbstractContextManager[None]:
        """Return each recorded output of a micro-batch, once, instead of running the parts."""
        return self._replaced(self._replay, micro_batch)

    @contextlib.contextmanager
    def _replaced(self, function: Callable[..., Any], micro_batch: int) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for part, calls in self._calls.items():
                if calls:  # recorded
                    replacement = functools.partial(function, calls[micro_batch])
                    stack.enter_context(_forward_replaced(part, replacement))
            yield

    def _record(
        self, calls: list[_Call | None], forward: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        output = forward(*args, **kwargs)
        features = isinstance(output, Tensor) and output.ndim == 2 and not output.requires_grad
        if features and not output.is_inference():  # inference tensors do not count changes
            calls.append(_Call(output, version_of(output), RandomState(self._devices)))
        else:
            calls.append(None)  # run it again
        return output

    def _replay(
        self, calls: list[_Call], forward: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        call = calls.pop(0) if calls else None
        if call is None or version_of(call.output) != call.version:
            return forward(*args, **kwargs)
        call.random_state.restore()  # as after the part's own random numbers
        return call.output


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
    if all(p.requires_grad for module in modules for p in module.parameters(recurse=False)):
        return []
    # These run in another form: compiled with their parent, or as copies in threads.
    roots = (m for m in modules if is_compiled(m) or isinstance(m, nn.DataParallel))
    not_called = {inner for root in roots for inner in root.modules()}
    parents = (m for m in modules if m not in not_called and not _frozen(m))
    children = dict.fromkeys(child for parent in parents for child in parent.children())
    return [child for child in children if _frozen(child) and not _has_hooks_inside(child)]


def _frozen(module: nn.Module) -> bool:
    required = [parameter.requires_grad for parameter in module.parameters()]
    return bool(required) and not any(required)


def _has_hooks_inside(part: nn.Module) -> bool:
    """Whether skipping the part's forward (or compiled call) would skip a user's hook."""
    skipped = [m for m in part.modules() if m is not part or is_compiled_in_place(part)]
    return not all(is_from_torch(hook) for module in skipped for hook in forward_hooks(module))


def _attributes(part: nn.Module) -> list[Any]:
    """All that the modules of a part refer to, with names and the members of containers.

    Parameters are left out: FSDP2 exchanges them during a forward pass.
    """
    found: list[Any] = []
    for module in part.modules():
        for name, value in vars(module).items():
            if name == "_parameters":
                continue
            found += [name, value]
            found += [*value, *value.values()] if isinstance(value, dict) else ()
            found += value if isinstance(value, (list, tuple, set)) else ()
    return found


def _same(before: list[Any], after: list[Any]) -> bool:
    """Whether both have the same objects, or equal numbers or strings, in the same order."""
    return len(before) == len(after) and all(
        old is new or (isinstance(old, (int, float, str)) and type(old) is type(new) and old == new)
        for old, new in zip(before, after, strict=True)
    )
