"""Frozen parts of a model (LiT): run in the first pass, their outputs reused in the second.

During a pass each frozen part has another `forward`, set on the instance: in the first pass it
records the part's outputs, in the second it returns them. The module itself stays in place, so code
of the model sees no change.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from megabatch.gradient_cache.autograd import is_from_torch
from megabatch.gradient_cache.state import RandomState
from megabatch.torch_internals import forward_hooks, is_compiled, uncompiled

#: A part's calls in one micro-batch: a copy of each output with the random state after the call, or
#: None if it cannot be reused.
Calls: TypeAlias = "list[tuple[Tensor, RandomState] | None]"


class FrozenParts:
    """The largest frozen modules, inside trained ones, that return a vector per sample.

    Other outputs than features, (rows, width), may be as large as activations. A part is run again
    if skipping it could make a difference: its output depends on something trained; its forward
    sets attributes, which the model may read; one of its modules has a hook; or the number of its
    calls differs between micro-batches.
    """

    def __init__(self, modules: list[nn.Module], devices: Iterable[torch.device]) -> None:
        """Find them; `devices`: of the random numbers that they may draw."""
        self._devices = set(devices)
        self._parts = _largest_frozen(modules)
        self._recorded: list[dict[nn.Module, Calls]] = []  # for each micro-batch

    def __bool__(self) -> bool:
        """Whether there is any."""
        return bool(self._parts)

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """Record the parts' outputs for the next micro-batch, which is encoded inside.

        The first one needs a graph, which shows the parts that are constant.
        """
        first = not self._recorded  # a forward pass sets attributes in all micro-batches or in none
        before = {part: _attributes(part) for part in self._parts if first}
        calls: dict[nn.Module, Calls] = {part: [] for part in self._parts}
        self._recorded.append(calls)
        with contextlib.ExitStack() as stack:
            for part in self._parts:
                stack.enter_context(_replaced(part, self._record, calls[part]))
            yield
        changed = {part for part in before if not _same(before[part], _attributes(part))}
        self._parts = [
            part
            for part, found in calls.items()
            if None not in found and len(found) == len(self._recorded[0][part])
            if part not in changed
        ]

    @contextlib.contextmanager
    def replayed(self, micro_batch: int) -> Iterator[None]:
        """Return each recorded output of a micro-batch, once, instead of running the parts."""
        with contextlib.ExitStack() as stack:
            for part in self._parts if self._recorded else ():
                stack.enter_context(_replaced(part, _replay, self._recorded[micro_batch][part]))
            yield

    def _record(self, calls: Calls, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        features = isinstance(output, Tensor) and output.ndim == 2 and not output.requires_grad
        # Copied, as the model may change it in place, and as it may be a view of activations.
        calls.append((output.clone(), RandomState(self._devices)) if features else None)
        return output


def _replay(calls: Calls, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    call = calls.pop(0) if calls else None
    if call is None:
        return forward(*args, **kwargs)
    output, random_state = call
    random_state.restore()  # as after the part's own random numbers
    return output


@contextlib.contextmanager
def _replaced(part: nn.Module, function: Callable[..., Any], calls: Calls) -> Iterator[None]:
    """Let this thread's calls of the part be `function(calls, forward, *args, **kwargs)` inside."""
    forward, thread, own = part.forward, threading.get_ident(), vars(part)

    @functools.wraps(forward)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != thread:
            return forward(*args, **kwargs)
        return function(calls, forward, *args, **kwargs)

    before = {"forward": own["forward"]} if "forward" in own else {}
    own["forward"] = replacement  # not by setattr, which wrappers pass on to the module inside
    try:
        yield
    finally:
        del own["forward"]
        own.update(before)


def _largest_frozen(modules: list[nn.Module]) -> list[nn.Module]:
    """Frozen children of other modules, except those whose `forward` may not be called."""
    # They run in another form: compiled, perhaps with their parent, or as copies in threads.
    roots = (uncompiled(m) for m in modules if is_compiled(m) or isinstance(m, nn.DataParallel))
    other = {inner for root in roots for inner in root.modules()}
    parents = (m for m in modules if m not in other and not _frozen(m))
    children = dict.fromkeys(child for parent in parents for child in parent.children())
    return [m for m in children if m not in other and _frozen(m) and not _has_hooks(m)]


def _frozen(module: nn.Module) -> bool:
    required = [parameter.requires_grad for parameter in module.parameters()]
    return bool(required) and not any(required)


def _has_hooks(part: nn.Module) -> bool:
    """Whether a user's hook may see or change something inside the part."""
    return not all(is_from_torch(hook) for m in part.modules() for hook in forward_hooks(m))


def _attributes(part: nn.Module) -> list[Any]:
    """All that the modules of a part refer to, and the members of containers.

    Parameters are left out: FSDP2 exchanges them during a forward pass.
    """
    found: list[Any] = []
    for module in part.modules():
        for value in (value for name, value in vars(module).items() if name != "_parameters"):
            members = value.values() if isinstance(value, dict) else value
            found += [value, *(members if isinstance(value, (dict, list, tuple, set)) else ())]
    return found


def _same(before: list[Any], after: list[Any]) -> bool:
    return len(before) == len(after) and all(map(operator.is_, before, after))
