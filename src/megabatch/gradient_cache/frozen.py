"""Parts of a model that pass no gradient on: run in the first pass, remembered in the second.

A model of a locked and a live tower (LiT) is one encoder: the second pass calls it whole. While a
pass runs, a stand-in takes the place of each locked part in its parent; it notes what the part gave
for a micro-batch, and gives it again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from megabatch.gradient_cache.state import get_random_state, set_random_state


class FrozenParts:
    """The largest frozen modules below trained ones that give a vector a sample.

    Frozen: it has parameters, and none requires a gradient. Only features, (rows, width), are
    remembered: what a frozen stem gives to trained layers can be as large as their activations. A
    part whose output depends on something trained before it is run again.
    """

    def __init__(self, modules: list[nn.Module], devices: Iterable[torch.device]) -> None:
        self.devices = set(devices)
        self._places = _places(modules)
        self._stand_ins = {id(part): _StandIn(part, self) for _, _, part in self._places}

    def __bool__(self) -> bool:
        """Whether there is any."""
        return bool(self._places)

    @contextlib.contextmanager
    def first_pass(self, micro_batch: int) -> Iterator[None]:
        """Note what the parts give; the graph of micro-batch 0 shows which of them are constant."""
        yield from self._standing_in(micro_batch, again=False)

    @contextlib.contextmanager
    def second_pass(self, micro_batch: int) -> Iterator[None]:
        """Give what was noted, once, instead of running the parts."""
        yield from self._standing_in(micro_batch, again=True)

    def _standing_in(self, micro_batch: int, again: bool) -> Iterator[None]:
        for stand_in in self._stand_ins.values():
            stand_in.begin(micro_batch, again)
        for parent, name, part in self._places:
            parent._modules[name] = self._stand_ins[id(part)]
        try:
            yield
        finally:
            for parent, name, part in self._places:
                parent._modules[name] = part


class _StandIn(nn.Module):
    """Called in the place of a part; everything else asked of it, the part answers."""

    def __init__(self, part: nn.Module, parts: FrozenParts) -> None:
        super().__init__()
        # Not as a submodule: nobody who looks through the model sees the part twice.
        self.__dict__["part"] = part
        self.__dict__["parts"] = parts
        self.noted: dict[int, list[tuple[Tensor, dict[torch.device, Tensor]]]] = {}
        self.constant = True
        self.micro_batch, self.again = 0, False

    def begin(self, micro_batch: int, again: bool) -> None:
        """What calls from here on are."""
        self.micro_batch, self.again = micro_batch, again

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The part's output, now or as it was."""
        if self.again and self.constant:
            calls = self.noted[self.micro_batch]
            output, random_state = calls.pop(0)
            set_random_state(random_state)  # where the part's own draws left it
            return output
        output = self.part(*args, **kwargs)
        if not self.again:
            self._note(output)
        return output

    def _note(self, output: Any) -> None:
        features = isinstance(output, Tensor) and output.ndim == 2 and not output.requires_grad
        if not (self.constant and features):
            self.constant = False
            self.noted.clear()
            return
        random_state = get_random_state(self.parts.devices)
        self.noted.setdefault(self.micro_batch, []).append((output, random_state))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["part"], name)


def _places(modules: list[nn.Module]) -> list[tuple[nn.Module, str, nn.Module]]:
    """(parent, name, part) wherever a module that is not frozen has a frozen one."""
    parameters = [p for module in modules for p in module.parameters(recurse=False)]
    if all(parameter.requires_grad for parameter in parameters):
        return []
    compiled = _compiled(modules)
    return [
        (parent, name, child)
        for parent in modules
        if parent not in compiled and not _frozen(parent)
        for name, child in parent._modules.items()
        if child is not None and _frozen(child)
    ]


def _frozen(module: nn.Module) -> bool:
    found = False
    for parameter in module.parameters():
        if parameter.requires_grad:
            return False
        found = True
    return found


def _compiled(modules: list[nn.Module]) -> set[nn.Module]:
    """Modules inside what torch.compile translates as one: there nobody can stand in."""
    roots = (m for m in modules if m._compiled_call_impl is not None or hasattr(m, "_orig_mod"))
    return {inner for root in roots for inner in root.modules()}
