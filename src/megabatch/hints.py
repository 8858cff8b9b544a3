"""Settings declared as fields of dataclasses: types, ranges, parsing and descriptions.

The annotation of a field has all of it: `lr: Annotated[float, Interval(above=0)] = 1e-3`.
"""

from __future__ import annotations

import contextlib
import functools
import math
import re
import types
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from megabatch.errors import did_you_mean

Mark = TypeVar("Mark")

_REFERENCE = re.compile(r"(?!hf:)[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


class Reference(str):
    """The type of a setting that names a Python object, as `module:name`. Values are plain str."""


_WORDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a text",
    Reference: "module:name",
}


def is_reference(value: object) -> bool:
    """Whether a value has the form `module:name`; `hf:FOLDER` names a folder."""
    return isinstance(value, str) and _REFERENCE.fullmatch(value) is not None


@dataclass(frozen=True)
class Interval:
    """The valid range of a number, or of each number in a list; never infinity or NaN."""

    above: float | None = None
    at_least: float | None = None
    at_most: float | None = None
    below: float | None = None

    def __contains__(self, value: Any) -> bool:
        if isinstance(value, tuple):
            return all(number in self for number in value)
        return (
            math.isfinite(value)
            and (self.above is None or value > self.above)
            and (self.at_least is None or value >= self.at_least)
            and (self.at_most is None or value <= self.at_most)
            and (self.below is None or value < self.below)
        )

    def __str__(self) -> str:
        bounds = [
            f"{name.replace('_', ' ')} {bound:,}"
            for name, bound in vars(self).items()
            if bound is not None
        ]
        if not bounds:
            return "a finite number"
        return ("" if self.above is None else "a number ") + " and ".join(bounds)


@dataclass(frozen=True)
class Details:
    """Computed help, which follows the field's docstring."""

    text: str


@dataclass(frozen=True)
class Positional:
    """Marks a positional argument: `Annotated[Path | None, Positional("RUN")]`."""

    metavar: str


@dataclass(frozen=True)
class Setting:
    """A field of a dataclass.

    Attributes:
        type: the type inside `Annotated`.
        default: `dataclasses.MISSING` if there is none.
        marks: the other arguments of `Annotated`, such as an `Interval`.
    """

    name: str
    type: Any
    default: Any
    marks: tuple[object, ...] = ()

    def mark(self, kind: type[Mark]) -> Mark | None:
        """The mark of this class, if there is one."""
        return next((mark for mark in self.marks if isinstance(mark, kind)), None)

    def expected(self, value: Any) -> str:
        """The valid range as a text if a value of the right type lies outside of it, else ""."""
        interval = self.mark(Interval)
        if interval is None or value is None or isinstance(value, str):  # a word, such as "auto"
            return ""
        return "" if value in interval else str(interval)


@functools.cache
def settings_of(cls: type) -> dict[str, Setting]:
    """The fields of a dataclass, by name and in order."""
    hints = get_type_hints(cls, include_extras=True)
    found = {}
    for one in fields(cls):
        hint = hints[one.name]
        plain, *marks = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        default = one.default if one.default_factory is MISSING else one.default_factory()
        found[one.name] = Setting(one.name, plain, default, tuple(marks))
    return found


def option(name: str) -> str:
    """A setting's name as an option: `--global-batch-size`."""
    return "--" + name.replace("_", "-")


def with_value(name: str, value: Any) -> str:
    """A setting with its value as an option: `--workers 4`, `--no-evaluate`."""
    if isinstance(value, bool):
        return option(name) if value else option(f"no_{name}")
    return f"{option(name)} {' '.join(map(str, value)) if isinstance(value, tuple) else value}"


def accepts(hint: Any, value: Any) -> bool:
    """Whether a value has a field's type. An int is a valid float, a bool is not a number."""
    if get_origin(hint) is Literal:
        return value in get_args(hint)
    if is_union(hint):
        return any(accepts(part, value) for part in get_args(hint))
    if get_origin(hint) is tuple:  # tuple[item, ...]
        item = get_args(hint)[0]
        return isinstance(value, tuple) and all(accepts(item, part) for part in value)
    if hint in (int, float) and isinstance(value, bool):
        return False
    if hint is Reference:
        return is_reference(value)
    return isinstance(value, (int, float) if hint is float else hint)


def describe_type(hint: Any) -> str:
    """A description of a field's type, for "expected ..."."""
    if get_origin(hint) is Literal:
        return " or ".join(repr(choice) for choice in get_args(hint))
    if is_union(hint):
        return " or ".join(describe_type(p) for p in get_args(hint) if p is not types.NoneType)
    if get_origin(hint) is tuple:
        return f"a list, each {describe_type(get_args(hint)[0])}"
    return _WORDS.get(hint, "a path")


def wanted(hint: Any, value: object) -> str:
    """A description of a field's type for a value that has another, with the choice it is like."""
    return describe_type(hint) + did_you_mean(str(value), _choices(hint))


def _choices(hint: Any) -> list[str]:
    parts = get_args(hint)
    return list(parts) if get_origin(hint) is Literal else [c for p in parts for c in _choices(p)]


def parse_value(hint: Any, word: str) -> Any:
    """Parse a word from the command line; "None" is None if the type allows it.

    Raises:
        ValueError: the word is no value of this type.
    """
    if is_union(hint):
        parts = get_args(hint)
        if types.NoneType in parts and word in ("None", "none"):
            return None
        *others, last = [part for part in parts if part is not types.NoneType]
        for part in others:
            with contextlib.suppress(ValueError):
                return parse_value(part, word)
        return parse_value(last, word)
    if get_origin(hint) is Literal:
        if word not in get_args(hint):
            raise ValueError(word)
        return word
    if hint is Reference:
        if not is_reference(word):
            raise ValueError(word)
        return word
    if hint is Path and not word:  # of an empty variable; Path("") is the working directory
        raise ValueError(word)
    return hint(word)


def is_union(hint: Any) -> bool:
    """Whether it is `X | Y` or Optional."""
    return get_origin(hint) in (Union, types.UnionType)


def placeholder(hint: Any) -> str:
    """The value's placeholder in a command's help."""
    if is_union(hint):
        return placeholder(next(part for part in get_args(hint) if part is not types.NoneType))
    if get_origin(hint) is Literal:
        return "{" + ",".join(get_args(hint)) + "}"
    if get_origin(hint) is tuple:
        return placeholder(get_args(hint)[0])
    return {int: "N", float: "X", Path: "PATH"}.get(hint, "TEXT")


def parse_bytes(text: str) -> int:
    """Parse a size: "80GiB", "80 GB", "80g" (binary) or a plain number of bytes.

    Raises:
        ValueError: the text is none of these.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?b)?\s*", text.lower())
    if match is None:
        raise ValueError(f"expected a size such as 80GiB, got {text!r}")
    number, unit, suffix = match.groups()
    decimal = suffix == "b" or not unit
    return int(float(number) * (_UNITS[unit] if decimal else _BINARY[unit]))
