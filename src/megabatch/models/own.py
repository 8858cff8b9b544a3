"""A model of the user's own, made by the function that a reference `module:function` names."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megabatch import references
from megabatch.errors import UsageError
from megabatch.models import weights as files
from megabatch.models.options import ModelOptions
from megabatch.models.towers import Towers


def create(name: str, weights: Path | None, options: ModelOptions) -> Towers:
    """Call the function and check its towers, whose name becomes the reference.

    Args:
        name: the reference. The function is called with `options` if it has such a parameter.
        weights: a file from `weights.find`, loaded into the module, or None.
        options: changes to the model; refused if the function does not take them.

    Raises:
        UsageError: there is no such function, it fails, it returns anything but usable `Towers`, or
            the weights are another model's.
    """
    label = f"--model {name}"
    function = references.load(name, "model")
    if "options" not in references.accepted(function, ("options",), label):
        given = options.given(*vars(options))
        if given:
            raise UsageError(
                f"{', '.join(given)}: {label} takes no options; expected a function with the "
                "parameter options (megabatch.models.ModelOptions)"
            )
    towers = references.call(function, label, options=options)
    if not isinstance(towers, Towers):
        raise UsageError(
            f"{label}: expected to return megabatch.models.Towers, got "
            f"{references.describe(towers)}"
        )
    _check(towers, label)
    if weights is not None:
        files.fill(towers.module, files.load(weights), weights, name)
    towers.module.train()
    return replace(towers, name=name)


def _check(towers: Towers, label: str) -> None:
    """Raise a UsageError that names the part of the towers that cannot be used."""
    module = towers.module
    if not isinstance(module, nn.Module):
        raise _wrong(label, "module", "a torch.nn.Module", module)
    for method in ("encode_image", "encode_text"):
        if not callable(getattr(module, method, None)):
            raise UsageError(f"{label}: module: expected a method {method}, as TwoTowers has")
    scale = getattr(module, "logit_scale", None)
    if not isinstance(scale, nn.Parameter) or scale.numel() != 1:
        raise _wrong(label, "module.logit_scale", "a parameter with one element", scale)
    for part in ("train_transform", "eval_transform", "tokenizer"):
        if not callable(value := getattr(towers, part)):
            raise _wrong(label, part, "a function", value)
    width = towers.embed_dim
    if not isinstance(width, int) or width < 1:
        raise _wrong(label, "embed_dim", "a whole number above 0", width)
    if towers.first not in ("image", "text"):
        raise _wrong(label, "first", "'image' or 'text'", towers.first)
    try:
        tokens = towers.tokenizer(["a", "b"])
    except Exception as error:
        raise references.failure(f"{label}: tokenizer", error) from error
    right = isinstance(tokens, Tensor) and tokens.dtype == torch.int64 and tokens.dim() == 2
    if not right or len(tokens) != 2:
        wanted = "int64 (n, context_length) for n texts"
        raise _wrong(label, "tokenizer", wanted, _kind(tokens))


def _kind(value: Any) -> Any:
    return (value.dtype, tuple(value.shape)) if isinstance(value, Tensor) else value


def _wrong(label: str, part: str, expected: str, value: object) -> UsageError:
    return UsageError(f"{label}: {part}: expected {expected}, got {references.describe(value)}")
