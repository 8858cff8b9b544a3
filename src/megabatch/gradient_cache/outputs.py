"""An encoder's outputs: from its micro-batches to the loss, and their gradients back to them."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from megabatch.gradient_cache.batches import filled
from megabatch.gradient_cache.by_length import Key
from megabatch.gradient_cache.feed import Feed, MicroBatch

Outputs: TypeAlias = "dict[Key, Tensor | None]"

#: Bytes from which an output's gradient waits on the host, unless the caller decides.
LARGE = 64 << 20


class CachedOutputs:
    """The outputs of an encoder for its whole batch: leaves of the loss's graph, then gradients.

    A mutable mapping that is no dict, such as Hugging Face's ModelOutput, reaches the loss as one
    object of the same class, with the cached tensors, and None for the others.

    Attributes:
        cached: the outputs until their gradients are there.
        gradients: of the outputs that got one.
        per_sample: the keys of those that have a row per sample.
    """

    def __init__(
        self, feed: Feed, wanted: Sequence[Key] | None, dtype: torch.dtype | None, *, single: bool
    ) -> None:
        """`wanted`: keys to be cached, in this dtype; `single`: it must be one tensor."""
        self.cached: Outputs = {}
        self.per_sample: set[Key] = set()
        self.gradients: dict[Key, Tensor] = {}
        self._feed, self._name = feed, feed.name
        self._wanted, self._dtype, self._single = wanted, dtype, single
        self._by_keyword = False
        self._empty: Any = None  # of the class that reaches the loss as one object

    def read(self, output: Any) -> Outputs:
        """Return the tensors that are to be cached, of what the encoder returned."""
        if isinstance(output, Tensor):
            output = (output,)
        if isinstance(output, Mapping):
            items: dict[Any, Any] = dict(output)
            self._by_keyword = type(output) is dict or not isinstance(output, MutableMapping)
            if not self._by_keyword and self._empty is None:
                self._empty = filled(output, dict.fromkeys(output))
        elif isinstance(output, (tuple, list)):
            items = dict(enumerate(output))
        else:
            raise TypeError(
                f"encoders: expected {self._name} to return a tensor, or a tuple or mapping of "
                f"tensors, got {type(output).__name__}"
            )
        wanted = items if self._wanted is None else self._wanted
        for key in wanted:
            if key not in items:
                present = ", ".join(map(repr, items))
                raise ValueError(f"outputs: expected {self._name} to return {key!r}, got {present}")
            if not isinstance(items[key], (Tensor, type(None))):
                got = type(items[key]).__name__
                raise TypeError(
                    f"encoders: expected output {key!r} of {self._name} to be a tensor or None, "
                    f"got {got} (outputs= names those that are to be cached)"
                )
        return {key: items[key] for key in wanted}

    def without_graph(self, outputs: Outputs) -> Outputs:
        """One micro-batch's outputs as they are cached."""
        cached = dict(outputs)
        for key, output in outputs.items():
            if output is not None:
                narrow = self._dtype and output.ndim > 1 and output.is_floating_point()
                cached[key] = output.detach().to(self._dtype if narrow else output.dtype)
        return cached

    def join(
        self, pieces: list[Outputs], micro_batches: Sequence[MicroBatch], *, requires_grad: bool
    ) -> None:
        """Cache the outputs of all micro-batches, as leaves that get a gradient where they can."""
        if any(piece.keys() != pieces[0].keys() for piece in pieces):
            raise ValueError(f"encoders: {self._name} gave different outputs for two micro-batches")
        for key in pieces[0]:
            whole = self._joined(key, [piece[key] for piece in pieces], micro_batches)
            if whole is not None:
                differentiable = whole.is_floating_point() or whole.is_complex()
                whole = whole.requires_grad_(requires_grad and differentiable)
            self.cached[key] = whole
        self._feed.check_outputs(self.per_sample)

    def _joined(
        self, key: Key, pieces: list[Tensor | None], micro_batches: Sequence[MicroBatch]
    ) -> Tensor | None:
        name = f"encoders: output {key!r} of {self._name}"
        tensors = [piece for piece in pieces if piece is not None]
        if not tensors:
            return None
        if len(tensors) < len(pieces):
            raise ValueError(f"{name} is None in some micro-batches only")
        of_batch, by_length = self._feed.sorted_by(key)
        divided = [micro_batch.of(of_batch) for micro_batch in micro_batches]
        encoded = [self._feed.encoded(rows) for rows in divided]
        if len({tensor.shape[1:2] for tensor in tensors}) > 1:
            tensors = _lengthened(tensors)
        shapes = [tuple(tensor.shape) for tensor in tensors]
        if shapes == [(n, *shapes[0][1:]) for n in encoded] and set(shapes) != {(1,)}:
            self.per_sample.add(key)
            kept = zip(tensors, divided, strict=True)
            whole = torch.cat([tensor[: rows.stop - rows.start] for tensor, rows in kept])
            return by_length.in_batch_order(whole) if by_length else whole
        if set(shapes) not in ({()}, {(1,)}):
            found, rows = (" or ".join(map(str, dict.fromkeys(each))) for each in (shapes, encoded))
            raise ValueError(
                f"{name} has shape {found} in micro-batches of {rows} rows; expected a row per "
                "sample (outputs= of a SortedByLength names those with its rows), or shape () or "
                "(1,)"
            )
        values = torch.stack(tensors)  # read back to the host, as the only value of a step
        same = (values == values[0]) | (values.isnan() & values[0].isnan())
        if len(tensors) > 1 and not same.all():
            raise ValueError(
                f"{name} has shape {shapes[0]}, as a value shared by all samples, but differs "
                "between micro-batches (if it is per sample: return shape (rows, 1), or use "
                "micro-batches of at least 2 rows)"
            )
        return tensors[0]

    def arguments(self) -> tuple[list[Any], dict[Any, Any]]:
        """Return the loss's positional and keyword arguments."""
        values = [*self.cached.values()]
        is_tuple = not self._by_keyword and self._empty is None and len(values) > 1
        if self._single and is_tuple:  # such as late interaction's tokens and mask
            return [tuple(values)], {}
        if self._single and (len(values) != 1 or values[0] is None):
            got = ", ".join(type(value).__name__ for value in values)
            raise TypeError(
                "encoders: with several encoders each must return one tensor or a tuple (or "
                f"outputs= select one), but {self._name} returned ({got})"
            )
        if self._empty is not None and not self._single:
            return [filled(self._empty, self.cached)], {}
        if self._by_keyword and not self._single:
            return [], {key: tensor for key, tensor in self.cached.items() if tensor is not None}
        return values, {}

    def trained(self) -> list[Tensor]:
        """The cached outputs that get a gradient."""
        return [t for t in self.cached.values() if t is not None and t.requires_grad]

    def take_gradients(self, found: dict[int, Tensor | None], *, zeros: bool) -> None:
        """Replace the outputs by their gradients, which are given by ids of tensors.

        `zeros`: if there is none, all are zero: DDP and FSDP2, which wait for theirs, would refuse
        the next step.
        """
        cached, self.cached = self.cached, {}
        for key, tensor in cached.items():
            gradient, by_length = found.pop(id(tensor), None), self._feed.sorted_by(key)[1]
            if gradient is not None and by_length and key in self.per_sample:
                gradient = by_length.in_own_order(gradient)
            if gradient is not None:
                self.gradients[key] = gradient
        if zeros and not self.gradients:
            tensors = ((key, tensor) for key, tensor in cached.items() if tensor is not None)
            self.gradients = {key: torch.zeros_like(tensor) for key, tensor in tensors}

    def move_gradients_to_host(self, wanted: bool | None) -> None:
        """Let the gradients of per-sample outputs wait on the host; None: the large ones."""
        for key in self.per_sample & self.gradients.keys():
            gradient = self.gradients[key]
            if wanted or (wanted is None and gradient.is_cuda and gradient.nbytes >= LARGE):
                self.gradients[key] = to_host(gradient)

    def with_gradients(
        self, encoded: Outputs, micro_batch: MicroBatch, *, last: bool
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return those outputs of a micro-batch that get a gradient, and their gradients.

        `last`: whether it is the last micro-batch, where gradients of shared outputs count.
        """
        outputs, gradients = [], []
        for key, output in encoded.items():
            gradient = self.gradients.get(key)
            if output is None or gradient is None or not output.requires_grad:
                continue
            if key in self.per_sample:
                rows = micro_batch.of(self._feed.sorted_by(key)[0])
                outputs.append(output[: rows.stop - rows.start])  # no row if it is idle
                own = gradient[rows]
                if own.shape[1:] != output.shape[1:]:  # it was `_lengthened`
                    own = own[:, : output.shape[1]]
                # From the host it is copied while the backward pass is being launched.
                gradients.append(own.to(output, non_blocking=True))
            else:  # every micro-batch reaches the same parameters, for DDP
                outputs.append(output)
                gradients.append(gradient if last else torch.zeros_like(gradient))
        return outputs, gradients


def _lengthened(tensors: list[Tensor]) -> list[Tensor]:
    """Outputs of tokens (rows, tokens, ...) as long as the longest, with zeros at the end.

    Micro-batches of texts of similar lengths differ in their number of tokens; the loss gets a mask
    of those that count (rows, tokens), in which zeros are none. Others are returned as they are.
    """
    first = tensors[0]
    if first.dim() < 3 and (first.dim() < 2 or first.is_floating_point()):
        return tensors
    longest = max(tensor.shape[1] for tensor in tensors)
    return [F.pad(t, [0, 0] * (t.dim() - 2) + [0, longest - t.shape[1]]) for t in tensors]


def to_host(tensor: Tensor) -> Tensor:
    """Copy a GPU's tensor to pinned host memory; only work in the GPU's stream may read it."""
    if not tensor.is_cuda:
        return tensor.cpu()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
