"""Types of settings: what values they take, in words, and from words."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}


def option(name: str) -> str:
    """A setting as it is written on the command line."""
    return "--" + name.replace("_", "-")


def with_value(name: str, value: Any) -> str:
    """An option with its value, as it is written on the command line."""
    if isinstance(value, bool):
        return option(name) if value else option(f"no_{name}")
    return f"{option(name)} {' '.join(map(str, value)) if isinstance(value, tuple) else value}"


def accepts(hint: Any, value: Any) -> bool:
    """Whether a value is of a field's type: exactly, but for whole numbers where a float goes."""
    if get_origin(hint) is Literal:
        return value in get_args(hint)
    if is_union(hint):
        return any(accepts(part, value) for part in get_args(hint))
    if get_origin(hint) is tuple:  # of any length, all of one type
        item = get_args(hint)[0]
        return isinstance(value, tuple) and all(accepts(item, part) for part in value)
    if hint in (int, float) and isinstance(value, bool):
        return False
    return isinstance(value, (int, float) if hint is float else hint)


def describe_type(hint: Any) -> str:
    """A field's type in words."""
    if get_origin(hint) is Literal:
        return " or ".join(repr(choice) for choice in get_args(hint))
    if is_union(hint):
        return " or ".join(describe_type(p) for p in get_args(hint) if p is not types.NoneType)
    if get_origin(hint) is tuple:
        return f"a list, each {describe_type(get_args(hint)[0])}"
    return _WORDS.get(hint, "a path")


def parse_value(hint: Any, word: str) -> Any:
    """The value that a word on the command line means; "None" is None where that is possible.

    Raises:
        ValueError: it means none of this type.
    """
    if is_union(hint):
        parts = get_args(hint)
        if types.NoneType in parts and word in ("None", "none"):
            return None
        return parse_value(next(part for part in parts if part is not types.NoneType), word)
    if get_origin(hint) is Literal:
        if word not in get_args(hint):
            raise ValueError(word)
        return word
    return hint(word)


def is_union(hint: Any) -> bool:
    """Whether it is `X | Y` or Optional."""
    return get_origin(hint) in (Union, types.UnionType)


def placeholder(hint: Any) -> str:
    """What stands for the value in a command's help."""
    if is_union(hint):
        return placeholder(next(part for part in get_args(hint) if part is not types.NoneType))
    if get_origin(hint) is Literal:
        return "{" + ",".join(get_args(hint)) + "}"
    if get_origin(hint) is tuple:
        return placeholder(get_args(hint)[0])
    return {int: "N", float: "X", Path: "PATH"}.get(hint, "TEXT")
