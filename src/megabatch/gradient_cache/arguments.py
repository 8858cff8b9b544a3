"""Checks of a GradientCache's arguments; the outputs of encoders as the loss's arguments."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from megabatch.gradient_cache.batches import filled
from megabatch.ranks import global_ranks

Key: TypeAlias = "int | str"  # a position in a tuple, or a mapping's key
Outputs: TypeAlias = "dict[Key, Tensor | None]"


def check_options(encoders: Sequence[Any], loss: Any, group: Any, feature_dtype: Any) -> None:
    """Check the types of these arguments."""
    if not encoders:
        raise ValueError("encoders: expected at least one, got none")
    for encoder in encoders:
        if not callable(encoder):
            raise TypeError(f"encoders: expected callables, got {type(encoder).__name__}")
    if not callable(loss):
        raise TypeError(f"loss: expected a callable, got {type(loss).__name__}")
    global_ranks(group)  # raises an error for anything else than a group
    if not isinstance(feature_dtype, (torch.dtype, type(None))):
        raise TypeError(f"feature_dtype: expected a torch.dtype or None, got {feature_dtype!r}")
    if feature_dtype is not None and not feature_dtype.is_floating_point:
        raise ValueError(f"feature_dtype: expected a floating point type, got {feature_dtype}")


# The functions below take the number of encoders, None for a single model that takes all batches.


def per_encoder(name: str, values: Sequence[Any], count: int | None) -> tuple[Any, ...]:
    """One value for each encoder, of which a single one is for all."""
    if len(values) not in (1, count or 1):
        raise ValueError(f"{name}: expected one, or one per encoder, {count}, got {len(values)}")
    return tuple(values) * ((count or 1) if len(values) == 1 else 1)


def integers(name: str, value: Any, count: int | None, least: int) -> tuple[int, ...]:
    """One number for each encoder."""
    several = count is not None and isinstance(value, (tuple, list))
    numbers = per_encoder(name, value if several else (value,), count)
    for number in numbers:
        if isinstance(number, bool) or not isinstance(number, int):
            raise TypeError(f"{name}: expected an int, got {type(number).__name__}")
        if number < least:
            raise ValueError(f"{name}: expected at least {least}, got {number}")
    return numbers


def checked_input_names(value: Any, count: int | None) -> tuple[str, ...]:
    """The keywords of a call that are batches."""
    names = tuple(value) if isinstance(value, (tuple, list, set, frozenset)) else None
    if names is None or not all(isinstance(name, str) for name in names):
        raise TypeError(f"input_names: expected a sequence of strings, got {value!r}")
    if names and len(names) != (count or len(names)):
        raise ValueError(f"input_names: expected one per encoder, {count}, got {', '.join(names)}")
    return names


def checked_outputs(value: Any, count: int | None) -> tuple[tuple[Key, ...] | None, ...]:
    """For each encoder, the keys of the outputs to be cached; None for all."""
    if value is None:
        return (None,) * (count or 1)
    keys = (value,) if isinstance(value, (int, str)) else tuple(value)
    if not keys or not all(isinstance(key, (int, str)) for key in keys):
        raise TypeError(f"outputs: expected keys or positions, got {value!r}")
    if count is None:
        return (keys,)
    return tuple((key,) for key in per_encoder("outputs", keys, count))


def named_batches(
    batches: Sequence[Any], by_name: Mapping[str, Any], count: int | None
) -> list[dict[str, Any]]:
    """For each encoder, its batches by name."""
    given = {f"batch {i}": batch for i, batch in enumerate(batches)} | {**by_name}
    if not given:
        raise TypeError("batches: expected at least one, got none")
    if count is None:
        return [given]
    if batches and by_name:
        raise TypeError(
            f"batches: expected all by position or all by keyword, got {len(batches)} by position "
            f"and {', '.join(by_name)} by keyword"
        )
    if len(given) != count:
        raise TypeError(f"batches: expected one per encoder, {count}, got {len(given)}")
    return [{name: batch} for name, batch in given.items()]


def call(name: str, encoder: Any, positional: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
    """Call an encoder, `name` for messages; explain why one that takes keywords fails."""
    try:
        return encoder(*positional, **keywords)
    except (AttributeError, TypeError) as error:
        mapping = next((batch for batch in positional if isinstance(batch, Mapping)), None)
        if mapping is None or not _takes_keywords(encoder, mapping):
            raise
        raise TypeError(
            f"encoders: {name} raised {type(error).__name__} for a {type(mapping).__name__} as one "
            "argument; if its entries are keywords of the model, as of Hugging Face's, expected "
            "such an encoder: lambda batch: model(**batch).pooler_output (or another output)"
        ) from error


def _takes_keywords(encoder: Any, batch: Mapping[Any, Any]) -> bool:
    """Whether a mapping's entries may be meant as keywords; a wrapper's `forward` takes any."""
    function = encoder.forward if isinstance(encoder, nn.Module) else encoder
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # of some functions in C
        return False
    return any(p.kind is p.VAR_KEYWORD or p.name in batch for p in parameters)


class OutputForm:
    """Takes the tensors out of an encoder's output, and arranges cached ones for the loss.

    A mutable mapping that is no dict, such as Hugging Face's ModelOutput, reaches it as one object
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

    `kept`, `encoded`: rows of the micro-batches, and rows that the encoder got. A ValueError names
    an output that is neither per sample nor shared by all samples.
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
    values = torch.stack(tensors)  # read back to the host, as the only value of a step
    same = (values == tensors[0]) | ((values != values) & (tensors[0] != tensors[0]))  # or all NaN
    if len(tensors) > 1 and not same.all():
        raise ValueError(
            f"{name} has shape {shapes[0]}, as a value shared by all samples, but differs between "
            "micro-batches (if it is per sample: return shape (rows, 1), or use micro-batches of "
            "at least 2 rows)"
        )
    return tensors[0], False
