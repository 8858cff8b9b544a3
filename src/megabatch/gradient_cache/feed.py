"""The way of an encoder's batches to the device, one micro-batch at a time."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

from megabatch.ahead import one_ahead
from megabatch.gradient_cache.batches import (
    PLACEHOLDER_ROWS,
    batch_size,
    leaves,
    mapped,
    named_tensors,
    placeholder,
    take,
    to_device,
)
from megabatch.gradient_cache.by_length import (
    Key,
    SortedByLength,
    equal_rows,
    equal_tokens,
    fewest_micro_batches,
)

#: A micro-batch's rows of each batch; the last element is a dict of those passed by keyword.
Parts: TypeAlias = "tuple[Any, ...]"

_THREAD = "megabatch-feed"


@dataclass(frozen=True)
class MicroBatch:
    """The rows that an encoder gets at a time; an idle one has none.

    `by_length`: those of sorted batches, by the batch's name.
    """

    rows: slice
    by_length: Mapping[str, slice] = field(default_factory=dict)

    @property
    def idle(self) -> bool:
        """Whether there are no rows, as on a rank that has fewer micro-batches than another."""
        return self.rows.start == self.rows.stop

    def of(self, batch: str) -> slice:
        """The rows of a batch, by its name; "": of one that is not sorted."""
        return self.by_length.get(batch, self.rows)


def divided(
    rows: int,
    size: int | None,
    by_length: Mapping[str, SortedByLength],
    tokens: int | None = None,
) -> list[MicroBatch]:
    """The micro-batches.

    `size`: the rows of one, or their mean in the sorted batches; the most rows if `tokens`, the
    most tokens of a sorted batch, take more micro-batches. One of the two may be None.
    """
    equal = equal_rows(rows, size or max(1, rows))
    runs = {name: batch.runs for name, batch in by_length.items()}
    least = [fewest_micro_batches(each, tokens) for each in runs.values() if tokens is not None]
    if (count := max(least, default=0)) > len(equal):
        equal = [slice(rows * i // count, rows * (i + 1) // count) for i in range(count)]
    cut = {name: equal_tokens(each, len(equal), tokens) for name, each in runs.items()}
    return [
        MicroBatch(part, {name: parts[i] for name, parts in cut.items()})
        for i, part in enumerate(equal)
    ]


class Feed:
    """The batches of an encoder, which takes them one micro-batch at a time, on a device.

    An output of the encoder has the rows and the order of the SortedByLength that names it, or that
    is the only batch.

    Attributes:
        rows: of each batch; 0 is legal.
        tensors: of the batches. Without rows, they are others that stand in for them.
        watched: tensors of the caller, by their paths.
    """

    def __init__(
        self,
        name: str,
        batches: Mapping[str, Any],
        keywords: Collection[str] = (),
        device: torch.device | None = None,
    ) -> None:
        """`name`: of the encoder, for messages; `keywords`: names of batches passed by keyword."""
        self.name = name
        self._sorted = {k: b for k, b in batches.items() if isinstance(b, SortedByLength)}
        if len(batches) > 1 and not all(batch.outputs for batch in self._sorted.values()):
            raise ValueError(
                f"batches: {name} takes {len(batches)}, so a SortedByLength must name its outputs "
                "(outputs=...)"
            )
        named = {**batches, **{k: batch.batch for k, batch in self._sorted.items()}}
        self.rows = batch_size(named)
        self.watched = {p: t for k, b in named.items() for p, t in named_tensors(b, k).items()}
        for path, tensor in self.watched.items():
            if torch.is_grad_enabled() and tensor.grad_fn is not None:
                raise ValueError(
                    f"{path} of {name}: expected no result of a computation with gradients "
                    f"({tensor.grad_fn.name()}), through which each micro-batch would "
                    "backpropagate: compute it inside the encoder, or detach it"
                )
        self._keywords = keywords
        # A rank without rows still takes part in the collectives.
        self._batches = named if self.rows else {k: placeholder(b) for k, b in named.items()}
        self.tensors = list(named_tensors(self._batches).values())
        if device is not None and device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        self.device = device

    def divided(self, size: int | None, tokens: int | None = None) -> list[MicroBatch]:
        """The micro-batches; for the arguments see `divided`.

        With `tokens`, the size is that of batches that are not sorted, which have no tokens.
        """
        unsorted = [name for name in self._batches if name not in self._sorted]
        if tokens is None:
            return divided(self.rows, size, self._sorted)
        if unsorted and (size is None or len(unsorted) == len(self._batches) > 1):
            raise ValueError(
                f"micro_batch_tokens: the tokens of {' and '.join(unsorted)} of {self.name} are "
                "not known; expected a SortedByLength (an encoder's only batch becomes one if it "
                "is token ids), and micro_batch_size for batches without tokens"
            )
        return divided(self.rows, size if unsorted else None, self._sorted, tokens)

    def __call__(self, micro_batches: Sequence[MicroBatch]) -> Generator[Parts, None, None]:
        """Yield the rows of each micro-batch; for an idle one (no rows), rows to be dropped.

        A thread decodes and moves the next one meanwhile. Its errors are raised here; closing the
        generator (`contextlib.closing`) waits for its end.
        """
        if self.device is None or not self._worth_a_thread(self.device):
            return (self._load(micro_batch) for micro_batch in micro_batches)
        if self.device.type == "cuda":
            return _on_cuda(self._load, micro_batches, self.device)
        return one_ahead(self._load, micro_batches, _THREAD)

    def encoded(self, rows: slice) -> int:
        """Number of rows that an encoder gets for a micro-batch's `rows`.

        Instead of none, which many models cannot take, one row, or an empty batch's placeholder.
        """
        return rows.stop - rows.start or (1 if rows.stop else PLACEHOLDER_ROWS)

    def sorted_by(self, key: Key) -> tuple[str, SortedByLength | None]:
        """The sorted batch that a per-sample output belongs to, with its name; or "" and None."""
        owners = (item for item in self._sorted.items() if key in (item[1].outputs or (key,)))
        return next(owners, ("", None))

    def check_outputs(self, per_sample: Collection[Key]) -> None:
        """Raise a ValueError if a batch names an output that is not per sample."""
        for key in (key for batch in self._sorted.values() for key in batch.outputs):
            if key not in per_sample:
                raise ValueError(
                    f"outputs: {key!r} of a SortedByLength is not a per-sample output of "
                    f"{self.name}; expected one of {', '.join(map(repr, per_sample))}"
                )

    def _load(self, micro_batch: MicroBatch) -> Parts:
        loaded = {}
        for name, batch in self._batches.items():
            rows = micro_batch.of(name)
            start = 0 if micro_batch.idle else rows.start
            rows = slice(start, start + self.encoded(rows))
            by_length = self._sorted.get(name) if self.rows else None
            loaded[name] = by_length.take(rows) if by_length else take(batch, rows, self.rows)
        if self.device is not None:
            loaded = mapped(loaded, functools.partial(to_device, device=self.device))
        named = {name: loaded.pop(name) for name in self._keywords}
        return (*loaded.values(), named)

    def _worth_a_thread(self, device: torch.device) -> bool:
        if any(tensor.requires_grad for tensor in self.tensors):
            return False  # the move is part of the graph, which belongs to the caller's thread
        made = any(not isinstance(leaf, torch.Tensor) for _, leaf in leaves(self._batches))
        return made or (device.type == "cuda" and any(t.device.type == "cpu" for t in self.tensors))


def _on_cuda(
    load: Callable[[MicroBatch], Parts], micro_batches: Sequence[MicroBatch], device: torch.device
) -> Generator[Parts, None, None]:
    """`one_ahead`, with the loads on a CUDA stream of their own, and two micro-batches at most."""
    stream = _stream(device)
    # The batches' tensors on the GPU may still be being computed.
    stream.wait_stream(torch.cuda.current_stream(device))
    used: list[torch.cuda.Event] = []  # the end of the caller's work on each micro-batch

    def load_on_stream(i: int) -> tuple[Parts, torch.cuda.Event]:
        if i > 1:  # the host may be far ahead of the GPU, where inputs would pile up
            used[i - 2].synchronize()
        with torch.cuda.device(device), torch.cuda.stream(stream):
            return load(micro_batches[i]), stream.record_event()

    order = range(len(micro_batches))
    with contextlib.closing(one_ahead(load_on_stream, order, _THREAD)) as loaded:
        for parts, ready in loaded:
            current = torch.cuda.current_stream(device)
            current.wait_event(ready)
            for tensor in named_tensors(parts).values():
                if tensor.is_cuda:  # its memory belongs to the other stream
                    tensor.record_stream(current)
            yield parts
            del parts
            used.append(torch.cuda.current_stream(device).record_event())


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """One stream per device: the allocator keeps separate memory for each stream."""
    return torch.cuda.Stream(device)
