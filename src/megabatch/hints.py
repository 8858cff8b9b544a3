"""Settings declared as fields of dataclasses: their types, ranges and names.

The annotation of a field has all of it: `lr: Annotated[float, Interval(above=0)] = 1e-3`.
"""

from __future__ import annotations

import functools
import math
import re
import types
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from megabatch.errors import did_you_mean

Mark = TypeVar("Mark")


_WORDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a text",
    Path: "a path",
}


def is_reference(value: object) -> bool:
    """Whether a value has the form `module:name`; `hf:FOLDER` names a folder."""
    pattern = r"(?!hf:)[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*"
    return isinstance(value, str) and re.fullmatch(pattern, value) is not None


@dataclass(frozen=True)
class Interval:
    """The valid range of a number, or of each number in a list; never infinity or NaN."""

    above: float = -math.inf
    at_least: float = -math.inf
    at_most: float = math.inf
    below: float = math.inf

    def __contains__(self, value: float) -> bool:
        return self.above < value < self.below and self.at_least <= value <= self.at_most

    def __str__(self) -> str:
        bounds = {name: bound for name, bound in vars(self).items() if math.isfinite(bound)}
        texts = [f"{name.replace('_', ' ')} {bound:,}" for name, bound in bounds.items()]
        start = "a number " if math.isfinite(self.above) else ""
        return start + " and ".join(texts) or "a finite number"


@dataclass(frozen=True)
class Form:
    """The form of a text: a regular expression, and words for "expected"."""

    pattern: str
    words: str

    def __contains__(self, value: str) -> bool:
        return re.fullmatch(self.pattern, value) is not None

    def __str__(self) -> str:
        return self.words


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
        marks: the other arguments of `Annotated`: an `Interval`, or a text for the help.
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

    @property
    def words(self) -> list[str]:
        """The values that are words of their own."""
        return [kind for kind in self.kinds if isinstance(kind, str)]

    def problem(self, value: object) -> str:
        """The type or range that was expected, for "expected ...", if a value has not; else ""."""
        if value is None and self.optional:
            return ""
        if self.many != isinstance(value, tuple):
            return self._expected(value)
        interval, form = self.mark(Interval), self.mark(Form)
        for item in value if isinstance(value, tuple) else (value,):
            if not any(_is(kind, item) for kind in self.kinds):
                return self._expected(item)
            limit = form if isinstance(item, str) else interval
            if limit is not None and item not in limit:
                return str(limit)
        return ""

    def _expected(self, value: object) -> str:
        kinds = " or ".join(_WORDS.get(kind, repr(kind)) for kind in self.kinds)
        return "a list, each " * self.many + kinds + did_you_mean(str(value), self.words)


def _is(kind: Any, value: object) -> bool:
    """Whether a value is of a kind. An int is a valid float, a bool is not a number."""
    if isinstance(kind, str):
        return value == kind
    return isinstance(value, (int, float) if kind is float else kind) and (
        kind is bool or not isinstance(value, bool)
    )


@functools.cache
def settings_of(cls: type) -> dict[str, Setting]:
    """The fields of a dataclass, by name and in order."""
    hints = get_type_hints(cls, include_extras=True)
    found = {}
    for one in fields(cls):
        hint = hints[one.name]
        plain, *marks = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        union = get_origin(plain) in (Union, types.UnionType)
        parts = [*(get_args(plain) if union else (plain,))]
        if optional := types.NoneType in parts:
            parts.remove(types.NoneType)
        if many := get_origin(parts[0]) is tuple:  # tuple[item, ...]
            parts = [get_args(parts[0])[0]]
        kinds = [k for p in parts for k in (get_args(p) if get_origin(p) is Literal else (p,))]
        default = one.default if one.default_factory is MISSING else one.default_factory()
        found[one.name] = Setting(one.name, tuple(kinds), many, optional, default, tuple(marks))
    return found


def option(name: str) -> str:
    """A setting's name as an option: `--global-batch-size`."""
    return "--" + name.replace("_", "-")


def with_value(name: str, value: object) -> str:
    """A setting with its value as an option: `--workers 4`, `--no-trim-texts`."""
    if isinstance(value, bool):
        return option(name) if value else option(f"no_{name}")
    return f"{option(name)} {shown(value)}"


def shown(value: object) -> str:
    """A value as it is typed."""
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


#: Sizes such as 80GiB, 1.5M, or a plain number of bytes.
SIZE = r"(\d+(?:\.\d+)?)([KMGT]?)(?:iB)?"


def parse_bytes(text: str) -> int:
    """The bytes of a size of the form `SIZE`."""
    match = re.fullmatch(SIZE, text)
    assert match is not None, text
    return int(float(match[1]) * 1024 ** " KMGT".find(match[2]))
