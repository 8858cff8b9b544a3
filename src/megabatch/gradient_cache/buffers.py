"""Buffers that forward passes update, such as the vectors of `spectral_norm` or a running mean.

In the second pass each micro-batch finds them as it did in the first, so that both compute the same
function; afterwards they are as `backward()` found them, so that each micro-batch counts once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from megabatch.gradient_cache.state import BATCH_NORMS, INSTANCE_NORMS
from megabatch.torch_internals import version_of

#: Elements up to which integers may be state. Larger ones are tables, or quantised weights.
INTEGERS = 1 << 16


#: Names of buffers that forward passes change by `buffer.data`, which has a version of its own.
_uncounted: WeakKeyDictionary[nn.Module, set[str]] = WeakKeyDictionary()


class _Saved(NamedTuple):
    """A module's buffer, with a copy of its value and its version at that time."""

    module: nn.Module
    name: str
    buffer: Tensor
    value: Tensor
    version: int

    def changed(self) -> bool:
        """Whether another tensor is in its place, or it was changed in place since."""
        now = getattr(self.module, self.name)
        counted = now is not self.buffer or version_of(now) != self.version
        return counted or self.name in _uncounted.get(self.module, ())

    def compare(self) -> None:
        """Find a change that the version does not count, and remember it for later steps."""
        if not self.changed() and not torch.equal(self.buffer, self.value):
            _uncounted.setdefault(self.module, set()).add(self.name)

    def restore(self) -> None:
        if getattr(self.module, self.name) is not self.buffer:
            setattr(self.module, self.name, self.buffer)
        with torch.no_grad():
            self.buffer.copy_(self.value)


class UpdatedBuffers:
    """Finds those that the first micro-batch's forward pass updates, and saves them for each.

    Running statistics of batch and instance normalisation are left out: in training mode they
    change no output.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        """`modules`: of the encoder, submodules included."""
        self._candidates = [
            (module, name)
            for module in modules
            if not isinstance(module, BATCH_NORMS + INSTANCE_NORMS)
            for name, buffer in module.named_buffers(recurse=False)
            if _may_be_state(buffer)
        ]
        self._known = False
        self._saved: list[list[_Saved]] = []

    @contextlib.contextmanager
    def first_pass(self, *, idle: bool, compare: bool = False) -> Iterator[None]:
        """Save the buffers for a micro-batch that is encoded inside.

        An idle one's rows are no data, and leave no trace. `compare`: their values as well as their
        versions, for which a GPU must be waited for.
        """
        saved = self._save()
        yield
        if not self._known:
            for buffer in saved if compare else ():
                buffer.compare()
            saved = [buffer for buffer in saved if buffer.changed()]
            self._candidates = [(buffer.module, buffer.name) for buffer in saved]
            self._known = True
        if idle:
            _restore(saved)
        self._saved.append(saved)

    @contextlib.contextmanager
    def second_pass(self) -> Iterator[None]:
        """Leave the buffers afterwards as they were before."""
        found = self._save()
        try:
            yield
        finally:
            _restore(found)
            self._saved = []

    def set_for(self, micro_batch: int) -> None:
        """Restore the buffers that a micro-batch found in the first pass."""
        _restore(self._saved[micro_batch])

    def _save(self) -> list[_Saved]:
        buffers = ((module, name, getattr(module, name)) for module, name in self._candidates)
        return [
            _Saved(module, name, buffer, buffer.detach().clone(), version_of(buffer))
            for module, name, buffer in buffers
        ]


def _restore(saved: Iterable[_Saved]) -> None:
    for buffer in saved:
        buffer.restore()


def _may_be_state(buffer: Tensor) -> bool:
    if buffer.is_inference():  # does not count changes
        return False
    return buffer.is_floating_point() or buffer.numel() <= INTEGERS
