"""Encoders' outputs: the tensors to be cached, and the form in which the loss gets them."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from megabatch.gradient_cache.batches import filled

Key: TypeAlias = "int | str"  # a position in a tuple, or a mapping's key
Outputs: TypeAlias = "dict[Key, Tensor | None]"


class OutputForm:
    """Takes the tensors out of an encoder's output, and arranges cached ones for the loss.

    A tensor, and the items of a tuple or list, reach the loss by position, the items of a dict by
    keyword. Any other mutable mapping, such as Hugging Face's ModelOutput, reaches it as one object
    of the same class, with the cached tensors, and None for the others.
    """

    def __init__(self, name: str, wanted: Sequence[Key] | None, *, single: bool) -> None:
        """`name`: of the encoder; `wanted`: keys to be cached; `single`: it must be one tensor."""
        self.name = name
        self._wanted = wanted
        self._single = single
        self._by_keyword = False
        self._empty: Any = None  # of the class that reaches the loss as one object

    def read(self, output: Any) -> Outputs:
        """Return the tensors that are to be cached.

        Raises:
            TypeError: one of them is neither a tensor nor None.
            ValueError: a wanted one is missing.
        """
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
                f"encoders: expected {self.name} to return a tensor, or a tuple or mapping of "
                f"tensors, got {type(output).__name__}"
            )
        for key in self._wanted or ():
            if key not in items:
                present = ", ".join(map(repr, items))
                raise ValueError(f"outputs: expected {self.name} to return {key!r}, got {present}")
        chosen = items if self._wanted is None else {key: items[key] for key in self._wanted}
        for key, value in chosen.items():
            if value is not None and not isinstance(value, Tensor):
                raise TypeError(
                    f"encoders: output {key!r} of {self.name} is of type {type(value).__name__}, "
                    "expected a tensor or None (outputs= names those that are to be cached)"
                )
        return chosen

    def arguments(self, cached: Outputs) -> tuple[list[Any], dict[Any, Any]]:
        """Return the loss's positional and keyword arguments."""
        if self._single and (len(cached) != 1 or None in cached.values()):
            got = ", ".join(type(value).__name__ for value in cached.values())
            raise TypeError(
                "encoders: with several encoders each must return one tensor (or outputs= select "
                f"one), but {self.name} returned ({got})"
            )
        if self._single:
            return list(cached.values()), {}
        if self._empty is not None:
            return [filled(self._empty, cached)], {}
        if self._by_keyword:
            return [], {key: tensor for key, tensor in cached.items() if tensor is not None}
        return list(cached.values()), {}


def assembled(
    name: str, pieces: list[Tensor | None], kept: list[int], encoded: list[int]
) -> tuple[Tensor | None, bool]:
    """Assemble an output of the whole batch from the micro-batches', and tell if it is per sample.

    Args:
        name: of the output, for messages.
        pieces: one per micro-batch.
        kept, encoded: rows of the micro-batches, and rows that the encoder got.

    Raises:
        ValueError: it is neither per sample nor shared by all samples.
    """
    tensors = [piece for piece in pieces if piece is not None]
    if not tensors:
        return None, False
    if len(tensors) < len(pieces):
        raise ValueError(f"{name} is None in some micro-batches only")
    shapes = [tuple(tensor.shape) for tensor in tensors]
    if shapes == [(n, *shapes[0][1:]) for n in encoded] and set(shapes) != {(1,)}:
        return torch.cat([tensor[:n] for tensor, n in zip(tensors, kept, strict=True)]), True
    if set(shapes) not in ({()}, {(1,)}):
        found, rows = (" or ".join(map(str, dict.fromkeys(each))) for each in (shapes, encoded))
        raise ValueError(
            f"{name} has shape {found} in micro-batches of {rows} rows; expected a row per sample, "
            "or shape () or (1,)"
        )
    if not _all_equal(tensors):
        raise ValueError(
            f"{name} has shape {shapes[0]}, as a value shared by all samples, but differs between "
            "micro-batches (if it is per sample: return shape (rows, 1), or use micro-batches of "
            "at least 2 rows)"
        )
    return tensors[0], False


def _all_equal(tensors: list[Tensor]) -> bool:
    """Whether all are equal, NaN equal to NaN: the one value that a step reads back to the host."""
    values, first = torch.stack(tensors), tensors[0]
    both_nan = (values != values) & (first != first)
    return len(tensors) == 1 or bool(((values == first) | both_nan).all())
