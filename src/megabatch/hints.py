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
        kinds: what a value may be: a type, or a word for itself.
        many: the value is a tuple, and each item is one of the kinds.
        optional: the value may be None.
        default: `dataclasses.MISSING` if there is none.
        marks: the other arguments of `Annotated`, such as an `Interval`.
    """

    name: str
    kinds: tuple[Any, ...]
    many: bool
    optional: bool
    default: Any
    marks: tuple[object, ...] = ()

    def mark(self, kind: type[Mark]) -> Mark | None:
        """The mark of this class, if there is one."""
        return next((mark for mark in self.marks if isinstance(mark, kind)), None)

    def accepts(self, value: Any) -> bool:
        """Whether a value has the type. An int is a valid float, a bool is not a number."""
        if value is None:
            return self.optional
        if self.many != isinstance(value, tuple):
            return False
        return all(any(_is(kind, one) for kind in self.kinds) for one in _items(value))

    def expected(self, value: Any) -> str:
        """The valid range as a text if a value of the right type lies outside of it, else ""."""
        interval = self.mark(Interval)
        if interval is None or value is None or isinstance(value, str):  # a word, such as "auto"
            return ""
        return "" if value in interval else str(interval)

    def wanted(self, value: object) -> str:
        """The type, for "expected ...", with the word that a value of another type is like."""
        words = [repr(k) if isinstance(k, str) else _WORDS.get(k, "a path") for k in self.kinds]
        each = "a list, each " if self.many else ""
        return each + " or ".join(words) + did_you_mean(str(value), self.words)

    @property
    def words(self) -> list[str]:
        """The values that are words of their own."""
        return [kind for kind in self.kinds if isinstance(kind, str)]

    @property
    def placeholder(self) -> str:
        """The value's placeholder in a command's help."""
        first = self.kinds[0]
        if isinstance(first, str):
            return "{" + ",".join(self.words) + "}"
        return {int: "N", float: "X", Path: "PATH"}.get(first, "TEXT")

    def parse(self, words: str | list[str] | bool) -> Any:
        """The value that the words after an option mean; "None" is None if that is allowed.

        Raises:
            ValueError: they mean none; the message says what was expected.
        """
        if isinstance(words, bool):
            return words
        values = tuple(map(self._parsed, words if isinstance(words, list) else [words]))
        value = values if self.many else values[0]
        if expected := self.expected(value):
            raise ValueError(expected)
        return value

    def _parsed(self, word: str) -> Any:
        if self.optional and word in ("None", "none"):
            return None
        for kind in self.kinds:
            with contextlib.suppress(ValueError):
                value = kind(word) if kind in (int, float, Path) else word
                # An empty variable is no path: Path("") is the working directory.
                if _is(kind, value) and (word or kind is not Path):
                    return value
        raise ValueError(self.wanted(word))


@functools.cache
def settings_of(cls: type) -> dict[str, Setting]:
    """The fields of a dataclass, by name and in order."""
    hints = get_type_hints(cls, include_extras=True)
    found = {}
    for one in fields(cls):
        hint = hints[one.name]
        plain, *marks = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        default = one.default if one.default_factory is MISSING else one.default_factory()
        alternatives = get_args(plain) if is_union(plain) else (plain,)
        parts = [part for part in alternatives if part is not types.NoneType]
        many = get_origin(parts[0]) is tuple  # tuple[item, ...]
        if many:
            parts = [get_args(parts[0])[0]]
        kinds = [k for p in parts for k in (get_args(p) if get_origin(p) is Literal else (p,))]
        optional = len(alternatives) > len(parts)
        found[one.name] = Setting(one.name, tuple(kinds), many, optional, default, tuple(marks))
    return found


def _is(kind: Any, value: Any) -> bool:
    if isinstance(kind, str):
        return bool(value == kind)
    if isinstance(value, bool):
        return kind is bool
    if kind is Reference:
        return is_reference(value)
    return isinstance(value, (int, float) if kind is float else kind)


def _items(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def option(name: str) -> str:
    """A setting's name as an option: `--global-batch-size`."""
    return "--" + name.replace("_", "-")


def with_value(name: str, value: Any) -> str:
    """A setting with its value as an option: `--workers 4`, `--no-evaluate`."""
    if isinstance(value, bool):
        return option(name) if value else option(f"no_{name}")
    return f"{option(name)} {shown(value)}"


def shown(value: Any) -> str:
    """A value as it is typed."""
    return " ".join(map(str, _items(value)))


def is_union(hint: Any) -> bool:
    """Whether it is `X | Y` or Optional."""
    return get_origin(hint) in (Union, types.UnionType)


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
