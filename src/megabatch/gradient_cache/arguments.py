"""Checked arguments of a GradientCache."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from megabatch.gradient_cache.outputs import Key


@dataclass(frozen=True)
class Settings:
    """The settings of a step.

    several: whether each batch has its own encoder; else a single one takes all batches.
    micro_batch_sizes, outputs: one per encoder; outputs are the keys to be cached, None for all.
    """

    encoders: tuple[Any, ...]
    several: bool
    micro_batch_sizes: tuple[int, ...]
    device: torch.device | None
    feature_dtype: torch.dtype | None
    input_names: tuple[str, ...]
    outputs: tuple[tuple[Key, ...] | None, ...]

    @classmethod
    def checked(
        cls,
        encoders: Any,
        loss: Any,
        micro_batch_size: Any,
        group: Any,
        device: Any,
        feature_dtype: Any,
        input_names: Any,
        outputs: Any,
        kept_micro_batches: Any,
        unknown: Mapping[str, Any],
    ) -> Settings:
        """Check the arguments of GradientCache.

        Raises:
            TypeError, ValueError: an argument is wrong; the message names it.
        """
        _check_unknown(unknown)
        several = isinstance(encoders, (tuple, list, nn.ModuleList))
        each = tuple(encoders) if several else (encoders,)
        if not each:
            raise ValueError("encoders: expected at least one, got none")
        for encoder in each:
            if not callable(encoder):
                raise TypeError(f"encoders: expected callables, got {type(encoder).__name__}")
        if not callable(loss):
            raise TypeError(f"loss: expected a callable, got {type(loss).__name__}")
        sizes = _per_encoder("micro_batch_size", micro_batch_size, len(each), several, 1)
        _check_group(group)
        _check_feature_dtype(feature_dtype)
        settings = cls(
            encoders=each,
            several=several,
            micro_batch_sizes=sizes,
            device=None if device is None else torch.device(device),
            feature_dtype=feature_dtype,
            input_names=_input_names(input_names, len(each), several),
            outputs=_outputs(outputs, len(each), several),
        )
        settings.kept_counts(kept_micro_batches)
        return settings

    def kept_counts(self, kept_micro_batches: Any) -> tuple[int, ...]:
        """For each encoder, the number of micro-batches whose graphs may be kept.

        Raises:
            TypeError, ValueError: it is neither one number nor one per encoder.
        """
        count = len(self.encoders)
        return _per_encoder("kept_micro_batches", kept_micro_batches, count, self.several, 0)

    def named_batches(
        self, batches: tuple[Any, ...], keywords: Mapping[str, Any]
    ) -> list[tuple[dict[str, Any], list[str]]]:
        """For each encoder, its batches by name, and the names of those passed by keyword.

        Raises:
            TypeError: the number of batches is wrong.
        """
        by_name = {name: keywords[name] for name in self.input_names if name in keywords}
        by_position = {f"batch {i}": batch for i, batch in enumerate(batches)}
        if not by_position and not by_name:
            raise TypeError("batches: expected at least one, got none")
        if not self.several:
            return [({**by_position, **by_name}, list(by_name))]
        if by_position and by_name:
            names = ", ".join(self.input_names)
            raise TypeError(
                f"batches: expected all by position or all by keyword ({names}), got "
                f"{len(by_position)} by position"
            )
        given = by_name or by_position
        if len(given) != len(self.encoders):
            raise TypeError(
                f"batches: expected one per encoder, {len(self.encoders)}, got {len(given)}"
            )
        return [({name: batch}, []) for name, batch in given.items()]


def call(name: str, encoder: Any, positional: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
    """Call an encoder, `name` for messages, with the rows of its batches.

    Raises:
        TypeError: it cannot take a batch that is a mapping as one argument, but takes keywords.
    """
    try:
        return encoder(*positional, **keywords)
    except (AttributeError, TypeError) as error:
        mappings = [batch for batch in positional if isinstance(batch, Mapping)]
        if not mappings or not _takes_keywords(encoder, mappings[0]):
            raise
        kind = type(mappings[0]).__name__
        raise TypeError(
            f"encoders: {name} raised {type(error).__name__} for a {kind} as one argument; if its "
            "entries are keywords of the model, as of Hugging Face's, expected such an encoder: "
            "lambda batch: model(**batch).pooler_output (or another output)"
        ) from error


def _takes_keywords(encoder: Any, batch: Mapping[Any, Any]) -> bool:
    """Whether a mapping's entries may be meant as keywords; a wrapper's `forward` takes any."""
    function = encoder.forward if isinstance(encoder, nn.Module) else encoder
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # of some functions in C
        return False
    return any(p.kind is p.VAR_KEYWORD or p.name in batch for p in parameters)


def _check_unknown(unknown: Mapping[str, Any]) -> None:
    if "scaler" in unknown:
        raise TypeError(
            "scaler: a step now returns a loss with a backward pass; scale it like any other "
            "loss: scaler.scale(step(...)).backward()"
        )
    if unknown:
        raise TypeError(
            f"GradientCache: got an unexpected keyword argument {next(iter(unknown))!r}"
        )


def _check_group(group: Any) -> None:
    is_group = False
    if torch.distributed.is_available():
        from torch.distributed.device_mesh import DeviceMesh

        is_group = isinstance(group, (torch.distributed.ProcessGroup, DeviceMesh))
    if not (group is None or is_group or (isinstance(group, str) and group == "local")):
        raise TypeError(
            f'group: expected a process group, None or "local", or a DeviceMesh, got {group!r}'
        )


def _check_feature_dtype(feature_dtype: Any) -> None:
    if not isinstance(feature_dtype, (torch.dtype, type(None))):
        kind = type(feature_dtype).__name__
        raise TypeError(f"feature_dtype: expected a torch.dtype or None, got {kind}")
    if feature_dtype is not None and not feature_dtype.is_floating_point:
        raise ValueError(f"feature_dtype: expected a floating point type, got {feature_dtype}")


def _per_encoder(
    name: str, value: Any, encoders: int, several: bool, least: int
) -> tuple[int, ...]:
    """One number for each encoder, from a value that may be a single one for all."""
    numbers = tuple(value) if several and isinstance(value, (tuple, list)) else (value,) * encoders
    if len(numbers) != encoders:
        raise ValueError(
            f"{name}: expected one number, or one per encoder, {encoders}, got {len(numbers)}"
        )
    for number in numbers:
        if isinstance(number, bool) or not isinstance(number, int):
            raise TypeError(f"{name}: expected an int, got {type(number).__name__}")
        if number < least:
            raise ValueError(f"{name}: expected at least {least}, got {number}")
    return numbers


def _input_names(value: Any, encoders: int, several: bool) -> tuple[str, ...]:
    names = tuple(value) if isinstance(value, (tuple, list, set, frozenset)) else None
    if names is None or not all(isinstance(name, str) for name in names):
        raise TypeError(f"input_names: expected a sequence of strings, got {value!r}")
    if several and names and len(names) != encoders:
        raise ValueError(
            f"input_names: expected one per encoder, {encoders}, got {', '.join(names)}"
        )
    return names


def _outputs(value: Any, encoders: int, several: bool) -> tuple[tuple[Key, ...] | None, ...]:
    if value is None:
        return (None,) * encoders
    keys = (value,) if isinstance(value, (int, str)) else tuple(value)
    if not keys or not all(isinstance(key, (int, str)) for key in keys):
        raise TypeError(f"outputs: expected keys or positions, got {value!r}")
    if not several:
        return (keys,)
    if len(keys) == 1:
        keys *= encoders
    if len(keys) != encoders:
        raise ValueError(f"outputs: expected one, or one per encoder, {encoders}, got {len(keys)}")
    return tuple((key,) for key in keys)
