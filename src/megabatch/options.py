"""Command-line options from dataclasses: a field is an option, its docstring the help.

argparse splits the words of a command line. Pydantic, whose dataclasses these are, converts and
checks the values, wherever they come from: a command line, a file or a call from Python.
"""

from __future__ import annotations

import argparse
import inspect
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar, get_args, get_origin

from pydantic import ConfigDict, ValidationError
from pydantic.fields import FieldInfo

from megabatch.errors import UsageError, all_of, did_you_mean

T = TypeVar("T")

#: Of each dataclass of options: `@dataclass(frozen=True, config=CONFIG)`.
CONFIG = ConfigDict(use_attribute_docstrings=True, allow_inf_nan=False, extra="forbid")

_METAVARS: dict[Any, str] = {int: "N", float: "X", Path: "PATH", str: "TEXT"}


def parse(cls: type[T], argv: Sequence[str], *, prog: str, positional: str = "") -> T:
    """Parse a command's options into an instance of the dataclass that declares them.

    Its docstring is the command's description. `positional` names the field that is no option.

    Raises:
        UsageError: an option does not exist, has an invalid value or is missing.
        SystemExit: after `--help`, which is printed.
    """
    return make(cls, read_words((cls,), argv, prog, inspect.getdoc(cls) or "", positional))


def make(cls: type[T], values: Mapping[str, Any]) -> T:
    """An instance of a dataclass from values, or from words that are converted to them.

    Raises:
        UsageError: values are invalid; it has the option, what came and what was expected of each.
    """
    try:
        return cls(**values)
    except ValidationError as error:
        expected: dict[str, list[str]] = {}  # a union has one error for each of its types
        for one in error.errors():
            name, value = option(str(one["loc"][0])), one["input"]
            text = one["msg"].replace("Input should be", "expected").removeprefix("Value error, ")
            text += did_you_mean(str(value), re.findall("'([^']+)'", text))
            if one["type"] == "unexpected_keyword_argument":
                text = _no_such_option(name, cls)
            expected.setdefault(f"{name} {value}", []).append(text)
        reasons = [f"{setting}: {' or '.join(texts)}" for setting, texts in expected.items()]
        raise UsageError(all_of(reasons)) from None


def read_words(
    classes: Iterable[Any], argv: Sequence[str], prog: str, description: str, positional: str = ""
) -> dict[str, Any]:
    """The options that were given, by field: words, lists of words, booleans, or None for "None".

    Raises:
        UsageError: an option does not exist, has no value or is missing.
        SystemExit: after `--help`, which is printed.
    """
    parser = _Parser(
        prog=prog,
        usage=f"{prog} [OPTIONS]",
        description=description,
        formatter_class=_Help,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    for cls in classes:
        for name, field in cls.__pydantic_fields__.items():
            _add(parser, name if name == positional else option(name), field)
    given, unknown = parser.parse_known_args(argv)
    if unknown:
        names = [word.partition("=")[0] for word in unknown if word.startswith("-")]
        reasons = [f"{name}: {_no_such_option(name, *classes)}" for name in names]
        raise UsageError(all_of(reasons or [f"{unknown[0]!r}: not expected"]))
    return vars(given)


def _no_such_option(name: str, *classes: Any) -> str:
    known = [option(field) for cls in classes for field in cls.__pydantic_fields__]
    return f"no such option{did_you_mean(name, known, most=2) or '; --help lists all'}"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message.removeprefix("argument "))


class _Help(argparse.HelpFormatter):
    """Breaks texts at spaces only, so that the names of options stay whole; keeps paragraphs."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        text = " ".join(text.split())
        return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        parts = text.split("\n\n")
        return "\n\n".join("\n".join(self._split_lines(part, width)) for part in parts)


def _add(parser: argparse.ArgumentParser, name: str, field: FieldInfo) -> None:
    """Add a field to a parser, as an option if its name begins with dashes."""
    types, required = list(_types(field.annotation)), field.is_required()
    text, default = field.description or "", field.get_default()
    if not required and default not in (None, False, "", ()):
        shown = " ".join(default) if isinstance(default, tuple) else default
        text += f" (default: {'on' if shown is True else shown})"
    text = text.replace("%", "%%")
    if bool in types:
        action = parser.add_argument(name, action=argparse.BooleanOptionalAction)
        action.help = text  # afterwards, as Python 3.10 adds the default
        return
    words = ",".join(one for one in types if isinstance(one, str))
    metavar = next((_METAVARS[one] for one in types if one in _METAVARS), f"{{{words}}}")
    more: dict[str, Any] = {"metavar": metavar, "required": required}
    if not name.startswith("--"):
        more = {"metavar": name.upper(), "nargs": None if required else "?"}
    if any(get_origin(one) is tuple for one in types):
        more["nargs"] = "+" if required else "*"
    parser.add_argument(name, help=text, type=_word, **more)


def _types(hint: Any) -> Iterator[Any]:
    """A type with all that it consists of: `tuple[int, ...]` and `int`, words of a Literal."""
    yield hint
    for part in get_args(hint):
        yield from _types(part)


def _word(text: str) -> str | None:
    if not text:  # as of an empty variable: Path("") is the working directory
        raise argparse.ArgumentTypeError("expected a value, got an empty one")
    return None if text == "None" else text


def option(name: str) -> str:
    """A setting's name as an option: `--global-batch-size`."""
    return "--" + name.replace("_", "-")


def is_reference(value: object) -> bool:
    """Whether a value has the form `module:name`; `hf:FOLDER` names a folder."""
    pattern = r"(?!hf:)[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*"
    return isinstance(value, str) and re.fullmatch(pattern, value) is not None


def parse_bytes(size: object) -> int:
    """The bytes of a size such as 20GiB, 80G or 1.5M, in powers of 1024, or of their number."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)(?:iB)?", str(size))
    if match is None:
        raise ValueError("expected a size such as 20GiB")
    return int(float(match[1]) * 1024 ** " KMGT".find(match[2]))
