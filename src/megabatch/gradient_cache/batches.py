"""An encoder's batches: their forms, sequences sorted by length, and their way to the device.

A batch is a tensor, or nested mappings, lists and tuples of tensors. Instead of a tensor there may
be an object that makes its rows on access, with `len(rows)` and `rows[slice] -> Tensor`, such as
compressed images: the same rows each time, without the global generators of torch, Python or NumPy,
perhaps in another thread than the caller's. Beside them there may be lists or tuples with an item
for each row, such as captions. Anything else in a batch, such as a string or a flag, is passed to
the encoder unchanged with each micro-batch.
"""

from __future__ import annotations

import bisect
import contextlib
import copy
import functools
import itertools
import sys
from collections.abc import (
    Callable,
    Collection,
    Generator,
    Iterator,
    Mapping,
    MutableMapping,
    Sequence,
)
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

from megabatch.ahead import one_ahead

#: Of an encoder's output: a position in a tuple, or a mapping's key.
Key: TypeAlias = "int | str"
#: A micro-batch's rows of each batch; the last element is a dict of those passed by keyword.
Parts: TypeAlias = "tuple[Any, ...]"
#: Lengths of sorted sequences: a number of columns, and how many rows need it, the longest first.
Runs: TypeAlias = "Sequence[tuple[int, int]]"

#: With two rows batch normalisation has statistics, and an output per sample is no single number.
PLACEHOLDER_ROWS = 2

_THREAD = "megabatch-feed"


def leaves(batch: Any, name: str = "batch") -> Iterator[tuple[str, Any]]:
    """Yield the tensors, and other objects with rows, of a batch with their paths for messages."""
    if isinstance(batch, Mapping):
        for key, value in batch.items():
            yield from leaves(value, f"{name}[{key!r}]")
    elif isinstance(batch, (list, tuple)):
        for i, value in enumerate(batch):
            yield from leaves(value, f"{name}[{i}]")
    elif _has_rows(batch):
        yield name, batch


def mapped(batch: Any, function: Callable[[Any], Any], rows: int = 0) -> Any:
    """Apply `function` to each leaf of the batch, in containers of the same types.

    `rows`: also to each list or tuple with an item for each of so many rows.
    """
    if isinstance(batch, Mapping):
        part = {key: mapped(value, function, rows) for key, value in batch.items()}
        plain = type(batch) is dict or not isinstance(batch, MutableMapping)
        return part if plain else filled(batch, part)
    if isinstance(batch, (list, tuple)) and not _has_items(batch, rows):
        values = [mapped(value, function, rows) for value in batch]
        return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)
    return function(batch) if _has_rows(batch) else batch


def _has_items(values: Sequence[Any], rows: int) -> bool:
    """Whether a list or tuple has an item for each row; with tensors inside it is a container."""
    named = hasattr(values, "_fields")
    return len(values) == rows > 0 and not named and next(leaves(values), None) is None


def _has_rows(value: Any) -> bool:
    text = isinstance(value, (str, bytes, bytearray, memoryview))
    return not text and hasattr(value, "__len__") and hasattr(value, "__getitem__")


def filled(mapping: Any, items: Mapping[Any, Any]) -> Any:
    """Copy a mapping, keeping its class, with these items instead of its own.

    For Hugging Face's BatchEncoding and ModelOutput (the latter has no `update`).
    """
    copied = copy.copy(mapping)
    for key, value in items.items():
        copied[key] = value
    return copied


def named_tensors(batch: Any, name: str = "batch") -> dict[str, Tensor]:
    """All tensors of a nested batch by their paths."""
    return {path: leaf for path, leaf in leaves(batch, name) if isinstance(leaf, Tensor)}


def batch_size(batches: Mapping[str, Any]) -> int:
    """The number of rows, common to all leaves of the batches; names are for messages."""
    size, first = 0, ""
    for name, leaf in itertools.chain.from_iterable(leaves(b, n) for n, b in batches.items()):
        if isinstance(leaf, Tensor) and leaf.ndim == 0:
            raise ValueError(f"{name}: expected a dimension of samples, got shape ()")
        if first and len(leaf) != size:
            raise ValueError(f"{name}: expected {size} rows as in {first}, got {len(leaf)}")
        size, first = len(leaf), first or name
    if not first:
        raise ValueError(f"{' and '.join(batches)}: expected tensors, got none")
    return size


def take(batch: Any, rows: slice, of: int) -> Any:
    """Slice every leaf (views), in containers of the same types; the batch has `of` rows."""
    return mapped(batch, lambda leaf: _taken(leaf, rows), of)


def _taken(leaf: Any, rows: slice) -> Any:
    part = leaf[rows]
    if isinstance(leaf, (Tensor, list, tuple)):
        return part
    count = rows.stop - rows.start
    if not isinstance(part, Tensor) or part.shape[:1] != (count,):
        got = f"shape {(*part.shape,)}" if isinstance(part, Tensor) else type(part).__name__
        wanted = f"{type(leaf).__name__}[{rows.start}:{rows.stop}]"
        raise ValueError(f"batch: expected {wanted} to be a tensor of {count} rows, got {got}")
    return part


def placeholder(batch: Any) -> Any:
    """Rows of ones in the form of a batch that has no rows.

    Ones are legal tokens, and attention masks that do not mask everything.
    """
    empty = take(batch, slice(0, 0), 0)
    return mapped(empty, lambda tensor: tensor.new_ones((PLACEHOLDER_ROWS, *tensor.shape[1:])))


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Move to the device; from the host asynchronously, through pinned memory."""
    if device.type == "cuda" and tensor.device.type == "cpu" and not tensor.requires_grad:
        # Unpinned memory would be copied synchronously, at a fraction of the speed.
        tensor = tensor if tensor.is_pinned() else tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


# --- sequences of different lengths ---------------------------------------------------------------


class SortedByLength:
    """A batch of padded sequences for a GradientCache that spends little computation on padding.

        step(images, SortedByLength(tokens, lengths))

    The encoder gets the rows in order of length, the longest first, without the columns that are
    padding in all rows of a micro-batch. The loss gets the outputs in the batch's own order. Use it
    for encoders whose result for row i depends only on its first `lengths[i]` columns, such as a
    text tower with a causal mask, or with a mask for padding.

    Micro-batches have nearly equal numbers of tokens (rows times columns): `micro_batch_size` is
    the mean number of rows, and none has more tokens than that many rows of the longest sequence.
    If the same encoder also takes other batches, one call has different numbers of rows from each.
    """

    def __init__(
        self,
        batch: Any,
        lengths: Tensor,
        *,
        multiple: int = 8,
        outputs: Key | Collection[Key] = (),
    ) -> None:
        """Find the order of the rows.

        Args:
            batch: a tensor (rows, columns, ...), or nested mappings, lists and tuples of tensors.
                Tensors of one dimension, and lists with an item for each row, are sorted but not
                cut.
            lengths: integers (rows,), from 1 to the number of columns.
            multiple: a micro-batch's number of columns is rounded up to a multiple of this (but not
                above the batch's), so that there are few different shapes to compile.
            outputs: if the encoder takes other batches too, the keys (or positions) of its outputs
                with a row for each of these sequences. By default, all that are per sample.

        Raises:
            TypeError, ValueError: the tensors' shapes differ, or are not those of the lengths; a
                length is out of range; an `attention_mask` in the batch has padding on the left.
        """
        columns = _columns(batch, lengths)
        if not isinstance(multiple, int) or multiple < 1:
            raise ValueError(f"multiple: expected an int of at least 1, got {multiple!r}")
        found = lengths.detach().cpu().to(torch.int64)
        if len(found) and not 1 <= int(found.min()) <= int(found.max()) <= columns:
            got = f"{int(found.min())} to {int(found.max())}"
            raise ValueError(f"lengths: expected 1 to {columns}, the number of columns, got {got}")
        for name, leaf in leaves(batch):
            if name.endswith("['attention_mask']"):
                _check_padding(name, leaf, lengths)
        ordered, order = found.sort(descending=True, stable=True)
        widths = (-(-ordered // multiple) * multiple).clamp(max=columns)
        values, counts = widths.unique_consecutive(return_counts=True)
        self.batch = batch
        self.outputs = (outputs,) if isinstance(outputs, (int, str)) else tuple(outputs)
        self._columns = columns
        self.runs = [*zip(values.tolist(), counts.tolist(), strict=True)]
        self._widths = widths.tolist()
        self._order, self._place = order, order.argsort()

    def take(self, rows: slice) -> Any:
        """Some rows in the encoder's order, at least one, with as many columns as the first needs.

        Tensors with one dimension stay as they are.
        """
        order, width = self._order[rows], self._widths[rows.start]

        def taken(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return type(leaf)(leaf[i] for i in order.tolist())
            cut = leaf[:, :width] if leaf.ndim > 1 else leaf
            return cut.index_select(0, to_device(order, leaf.device))

        return mapped(self.batch, taken, len(self._order))

    def in_batch_order(self, output: Tensor) -> Tensor:
        """An encoder's output (rows, ...), in the batch's order."""
        return output.index_select(0, to_device(self._place, output.device))

    def in_own_order(self, rows: Tensor) -> Tensor:
        """Rows in the batch's order, such as outputs' gradients, in the encoder's order."""
        return rows.index_select(0, to_device(self._order, rows.device))

    def longer(self, count: int) -> float:
        """How many times as many tokens a micro-batch may have in a similar batch; see `growth`."""
        return growth(self.runs, self._columns, count)


def up_to_last(present: Tensor) -> Tensor:
    """Columns up to each row's last one that is true, int64 (n,); of (n, columns), bool.

    All for a row without any: attention to nothing but padding is an average over all of it.
    """
    columns = present.shape[1]
    positions = torch.arange(1, columns + 1, device=present.device)
    last = torch.where(present, positions, 0).amax(1)
    return torch.where(last == 0, columns, last)


def tokens_by_length(name: str, batch: Any) -> Any:
    """A batch of token ids (rows, columns) in order of the lengths in its `attention_mask`.

    Without a mask all rows have the same length. A batch that has neither is returned as it is.
    """
    tensors = {} if isinstance(batch, SortedByLength) else named_tensors(batch, name)
    flat = {path: t for path, t in tensors.items() if t.ndim == 2}
    masks = [t for path, t in flat.items() if path.endswith("['attention_mask']")]
    ids = [t for t in flat.values() if t.dtype in (torch.int32, torch.int64)]
    if not (masks or ids):
        return batch
    tokens = (masks or ids)[0]
    others = [path for path, t in tensors.items() if t.ndim > 1 and t.shape[:2] != tokens.shape]
    if others:
        raise ValueError(
            f"micro_batch_tokens: expected tensors of shape {(*tokens.shape,)} or with one "
            f"dimension beside the token ids, got {' and '.join(others)} with "
            f"{(*tensors[others[0]].shape,)}; use micro_batch_size, or an encoder for each"
        )
    return SortedByLength(batch, up_to_last((tokens != 0) | (not masks)))


def _columns(batch: Any, lengths: Tensor) -> int:
    """The number of columns of a batch's tensors; checks their shapes."""
    if not isinstance(lengths, Tensor) or lengths.is_floating_point() or lengths.ndim != 1:
        got = f"{lengths.dtype} {(*lengths.shape,)}" if isinstance(lengths, Tensor) else lengths
        raise TypeError(f"lengths: expected a tensor of integers (rows,), got {got!r}")
    columns: dict[int, str] = {}
    for name, leaf in leaves(batch):
        if not isinstance(leaf, Tensor) or leaf.shape[:1] != lengths.shape:
            got = f"shape {(*leaf.shape,)}" if isinstance(leaf, Tensor) else type(leaf).__name__
            raise ValueError(
                f"{name}: expected a tensor of {len(lengths)} rows, as lengths has, got {got}"
            )
        if leaf.ndim > 1:
            columns.setdefault(leaf.shape[1], name)
    if len(columns) != 1:
        got = ", ".join(f"{name} with {count}" for count, name in columns.items()) or "none"
        raise ValueError(f"batch: expected tensors with one number of columns, got {got}")
    return next(iter(columns))


def _check_padding(name: str, mask: Tensor, lengths: Tensor) -> None:
    """Check that no row begins with padding and has tokens where it is cut; waits for no device."""
    if mask.ndim != 2 or mask.device.type not in ("cpu", lengths.device.type):
        return
    present = mask != 0
    place = torch.arange(mask.shape[1], device=mask.device)
    behind = place >= lengths.to(mask.device)[:, None]
    if (~present[:, 0] & (present & behind).any(1)).any():
        raise ValueError(
            f"{name}: expected padding on the right, as a sequence's first columns are kept, got "
            'it on the left (tokenizer.padding_side = "right")'
        )


# --- the rows of micro-batches: equally many, or of equal numbers of tokens ----------------------


def equal_rows(rows: int, size: int) -> list[slice]:
    """Micro-batches of `size` rows; the last one may have fewer."""
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]


def equal_tokens(runs: Runs, count: int, limit: int | None = None) -> list[slice]:
    """Divide sequences into `count` micro-batches, the largest with as few tokens as possible.

    A micro-batch has at least one row; its tokens are rows times the columns of the first one.
    `limit`: of tokens, which only single rows exceed; `count` is at least `fewest_micro_batches`.
    """
    found = equal_token_runs(runs, count, limit)
    sizes = [size for size, _, number in found for _ in range(number)]
    ends = itertools.accumulate(sizes)
    return [slice(end - size, end) for size, end in zip(sizes, ends, strict=True)]


def equal_token_runs(
    runs: Runs, count: int, limit: int | None = None
) -> list[tuple[int, int, int]]:
    """Runs of equal micro-batches of `equal_tokens`: rows, columns of the first row, and number."""
    spare = sum(n for _, n in runs) - count  # beyond a row for each micro-batch
    return _packed(runs, fewest_tokens(runs, count, limit), spare)


def fewest_tokens(runs: Runs, count: int, limit: int | None = None) -> int:
    """The tokens of the largest micro-batch in `equal_tokens`; 0 without any row.

    `limit`: see there; rows that exceed it do not count.
    """
    if not runs:
        return 0
    longest = runs[0][0]
    most = -(-sum(n for _, n in runs) // count) * longest  # as with equal rows
    least = longest if limit is None else min(longest, limit)

    def suffices(tokens: int) -> bool:  # with more tokens in each micro-batch, fewer are needed
        return fewest_micro_batches(runs, tokens) <= count

    return least + bisect.bisect_left(range(least, most), True, key=suffices)


def fewest_micro_batches(runs: Runs, limit: int) -> int:
    """How many micro-batches there are at least, if only single rows have more tokens."""
    return sum(number for *_, number in _packed(runs, limit))


def growth(runs: Runs, columns: int, count: int) -> float:
    """How many times as many tokens the largest micro-batch has if one row needs all `columns`."""
    if not runs:
        return 1.0
    (longest, n), *others = runs
    longer = [(columns, 1), (longest, n - 1), *others]
    return fewest_tokens(longer, count) / fewest_tokens(runs, count)


def _packed(runs: Runs, limit: int, spare: int = sys.maxsize) -> list[tuple[int, int, int]]:
    """As `equal_token_runs`, with at most `limit` tokens each, and `spare` more rows than parts.

    A row with more is a micro-batch of its own.
    """
    found: list[tuple[int, int, int]] = []
    start = end = 0
    for columns, n in runs:
        end += n
        while start < end:
            size = max(1, min(limit // columns, 1 + spare))
            number = -(-(end - start) // size)  # the last of them may reach into the next run
            if size > 1:
                number = min(number, spare // (size - 1))
            found.append((size, columns, number))
            spare -= number * (size - 1)
            start += number * size
    return found


# --- an encoder's batches, one micro-batch at a time ---------------------------------------------


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
