"""Checks of a GradientCache's arguments."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from megabatch.gradient_cache.outputs import Key


def check_types(loss: Any, group: Any, feature_dtype: Any) -> None:
    """Check the arguments that need not be converted.

    Raises:
        TypeError, ValueError: one is wrong; the message names it.
    """
    if not callable(loss):
        raise TypeError(f"loss: expected a callable, got {type(loss).__name__}")
    is_group = group is None or (isinstance(group, str) and group == "local")
    if not is_group and torch.distributed.is_available():
        from torch.distributed.device_mesh import DeviceMesh

        is_group = isinstance(group, (torch.distributed.ProcessGroup, DeviceMesh))
    if not is_group:
        raise TypeError(
            f'group: expected a process group, None or "local", or a DeviceMesh, got {group!r}'
        )
    if not isinstance(feature_dtype, (torch.dtype, type(None))):
        kind = type(feature_dtype).__name__
        raise TypeError(f"feature_dtype: expected a torch.dtype or None, got {kind}")
    if feature_dtype is not None and not feature_dtype.is_floating_point:
        raise ValueError(f"feature_dtype: expected a floating point type, got {feature_dtype}")


def checked_encoders(encoders: Any) -> tuple[tuple[Any, ...], bool]:
    """The encoders, and whether there is one for each batch.

    Raises:
        TypeError, ValueError: there is none, or one that cannot be called.
    """
    several = isinstance(encoders, (tuple, list, nn.ModuleList))
    each = tuple(encoders) if several else (encoders,)
    if not each:
        raise ValueError("encoders: expected at least one, got none")
    for encoder in each:
        if not callable(encoder):
            raise TypeError(f"encoders: expected callables, got {type(encoder).__name__}")
    return each, several


def per_encoder(name: str, value: Any, count: int, several: bool, least: int) -> tuple[int, ...]:
    """One number for each of `count` encoders, from a value that may be a single one for all.

    Raises:
        TypeError, ValueError: it is neither one number nor one per encoder, or below `least`.
    """
    numbers = tuple(value) if several and isinstance(value, (tuple, list)) else (value,) * count
    if len(numbers) != count:
        raise ValueError(
            f"{name}: expected one number, or one per encoder, {count}, got {len(numbers)}"
        )
    for number in numbers:
        if isinstance(number, bool) or not isinstance(number, int):
            raise TypeError(f"{name}: expected an int, got {type(number).__name__}")
        if number < least:
            raise ValueError(f"{name}: expected at least {least}, got {number}")
    return numbers


def checked_input_names(value: Any, count: int, several: bool) -> tuple[str, ...]:
    """The keywords of a call that are batches.

    Raises:
        TypeError, ValueError: they are no strings, or not one per encoder.
    """
    names = tuple(value) if isinstance(value, (tuple, list, set, frozenset)) else None
    if names is None or not all(isinstance(name, str) for name in names):
        raise TypeError(f"input_names: expected a sequence of strings, got {value!r}")
    if several and names and len(names) != count:
        raise ValueError(f"input_names: expected one per encoder, {count}, got {', '.join(names)}")
    return names


def checked_outputs(value: Any, count: int, several: bool) -> tuple[tuple[Key, ...] | None, ...]:
    """For each encoder, the keys of the outputs to be cached; None for all.

    Raises:
        TypeError, ValueError: they are no keys, or not one per encoder.
    """
    if value is None:
        return (None,) * count
    keys = (value,) if isinstance(value, (int, str)) else tuple(value)
    if not keys or not all(isinstance(key, (int, str)) for key in keys):
        raise TypeError(f"outputs: expected keys or positions, got {value!r}")
    if not several:
        return (keys,)
    keys = keys * count if len(keys) == 1 else keys
    if len(keys) != count:
        raise ValueError(f"outputs: expected one, or one per encoder, {count}, got {len(keys)}")
    return tuple((key,) for key in keys)


def named_batches(
    batches: Sequence[Any],
    keywords: Mapping[str, Any],
    names: Sequence[str],
    count: int,
    several: bool,
) -> list[dict[str, Any]]:
    """For each of `count` encoders, its batches by name.

    Raises:
        TypeError: the number of batches is wrong.
    """
    by_position = {f"batch {i}": batch for i, batch in enumerate(batches)}
    by_name = {name: keywords[name] for name in names if name in keywords}
    given = {**by_position, **by_name}
    if not given:
        raise TypeError("batches: expected at least one, got none")
    if not several:
        return [given]
    if by_position and by_name:
        raise TypeError(
            f"batches: expected all by position or all by keyword ({', '.join(names)}), got "
            f"{len(by_position)} by position"
        )
    if len(given) != count:
        raise TypeError(f"batches: expected one per encoder, {count}, got {len(given)}")
    return [{name: batch} for name, batch in given.items()]


def call(name: str, encoder: Any, positional: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
    """Call an encoder, `name` for messages, with the rows of its batches.

    Raises:
        TypeError: it cannot take a batch that is a mapping as one argument, but takes keywords.
    """
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
