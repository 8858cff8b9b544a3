"""Checks of a GradientCache's arguments: a TypeError or ValueError names the wrong one."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from megabatch.gradient_cache.outputs import Key


def check_encoders(encoders: Sequence[Any]) -> None:
    """Check that there are some, and that they can be called."""
    if not encoders:
        raise ValueError("encoders: expected at least one, got none")
    for encoder in encoders:
        if not callable(encoder):
            raise TypeError(f"encoders: expected callables, got {type(encoder).__name__}")


def check_options(loss: Any, group: Any, feature_dtype: Any) -> None:
    """Check the arguments that are the same for all encoders."""
    if not callable(loss):
        raise TypeError(f"loss: expected a callable, got {type(loss).__name__}")
    known = group is None or (isinstance(group, str) and group == "local")
    if not known and torch.distributed.is_available():
        from torch.distributed.device_mesh import DeviceMesh

        known = isinstance(group, (torch.distributed.ProcessGroup, DeviceMesh))
    if not known:
        raise TypeError(
            f'group: expected a process group, None or "local", or a DeviceMesh, got {group!r}'
        )
    if not isinstance(feature_dtype, (torch.dtype, type(None))):
        kind = type(feature_dtype).__name__
        raise TypeError(f"feature_dtype: expected a torch.dtype or None, got {kind}")
    if feature_dtype is not None and not feature_dtype.is_floating_point:
        raise ValueError(f"feature_dtype: expected a floating point type, got {feature_dtype}")


def per_encoder(name: str, value: Any, count: int, several: bool, least: int) -> tuple[int, ...]:
    """One number for each of `count` encoders, from a value that may be a single one for all."""
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
    """The keywords of a call that are batches."""
    names = tuple(value) if isinstance(value, (tuple, list, set, frozenset)) else None
    if names is None or not all(isinstance(name, str) for name in names):
        raise TypeError(f"input_names: expected a sequence of strings, got {value!r}")
    if several and names and len(names) != count:
        raise ValueError(f"input_names: expected one per encoder, {count}, got {', '.join(names)}")
    return names


def checked_outputs(value: Any, count: int, several: bool) -> tuple[tuple[Key, ...] | None, ...]:
    """For each encoder, the keys of the outputs to be cached; None for all."""
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
    batches: Sequence[Any], by_name: Mapping[str, Any], count: int, several: bool
) -> list[dict[str, Any]]:
    """For each of `count` encoders, its batches by name."""
    given = {f"batch {i}": batch for i, batch in enumerate(batches)} | {**by_name}
    if not given:
        raise TypeError("batches: expected at least one, got none")
    if not several:
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
