"""Command-line options from dataclasses: a field is an option, its docstring the help."""

from __future__ import annotations

import argparse
import ast
import contextlib
import difflib
import inspect
import textwrap
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from megabatch.errors import UsageError, all_of
from megabatch.hints import Positional, Setting, option, settings_of, shown

T = TypeVar("T")

_METAVARS: dict[Any, str] = {int: "N", float: "X", Path: "PATH"}


@dataclass
class Parser:
    """Parses the options of one command.

    Args:
        classes: dataclasses whose fields are the options; a bool is `--name` and `--no-name`.
        prog, description: for the help; without a description there is none.
        elsewhere: options of other programs, each with its replacement.
        common: fields that `--help` lists, while `--help-all` lists all; none: both list all.
    """

    classes: tuple[type, ...]
    prog: str
    description: str
    elsewhere: Mapping[str, str] = field(default_factory=dict)
    common: Collection[str] = ()

    def parse(self, argv: Sequence[str]) -> dict[str, Any]:
        """The values of the options that were given, by field.

        Raises:
            UsageError: an option does not exist, has an invalid value or is missing.
            SystemExit: after `--help`, which is printed.
        """
        settings = {name: one for cls in self.classes for name, one in settings_of(cls).items()}
        given, unknown = self._parser(settings, argv).parse_known_args(argv)
        if unknown:
            raise UsageError(all_of(self._not_known(unknown, settings)))
        return {k: tuple(v) if settings[k].many else v for k, v in vars(given).items()}

    def _parser(
        self, settings: Mapping[str, Setting], argv: Sequence[str]
    ) -> argparse.ArgumentParser:
        """argparse's parser, with the help that is asked for, if any."""
        parser = _Arguments(
            prog=self.prog,
            usage=f"{self.prog} [OPTIONS]",
            description=self.description,
            formatter_class=_Help,
            argument_default=argparse.SUPPRESS,
            allow_abbrev=False,
            add_help=bool(self.description),
        )
        if self.common:
            about = f"show all {len(settings)} options and exit"
            parser.add_argument("--help-all", action="help", help=about)
        helped = {"-h", "--help", "--help-all"} & {*argv}
        short = self.common and "--help-all" not in argv
        texts = {k: v for cls in self.classes * bool(helped) for k, v in option_texts(cls).items()}
        for name, setting in settings.items():
            hidden = short and name not in self.common
            _add(parser, setting, None if hidden else texts.get(name, ""))
        return parser

    def _not_known(self, words: Sequence[str], settings: Collection[str]) -> list[str]:
        """The reasons why words are no options, with what to use instead."""
        reasons = []
        for name in (word.partition("=")[0] for word in words if word.startswith("-")):
            # A misspelt option of another program means that one: `--batchsize`.
            known = [*map(option, settings), *self.elsewhere]
            close = next(iter(difflib.get_close_matches(name, known, n=1)), "")
            meant = f"did you mean {close}?" if close else f"see {self.prog} --help"
            reasons.append(f"{name}: no such option; {self.elsewhere.get(close, meant)}")
        return reasons or [f"{words[0]!r}: not expected; options begin with --"]


def parse(cls: Callable[..., T], argv: Sequence[str], *, prog: str) -> T:
    """Parse a command's options into an instance of the dataclass that declares them.

    Its docstring is the command's description.

    Raises:
        UsageError, SystemExit: as `Parser.parse`.
    """
    assert isinstance(cls, type)
    return cls(**Parser((cls,), prog, inspect.getdoc(cls) or "").parse(argv))


class _Arguments(argparse.ArgumentParser):
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


def _add(parser: argparse.ArgumentParser, setting: Setting, text: str | None) -> None:
    """Add an option to a parser; without a text the help does not list it."""
    required, first = setting.default is MISSING, setting.kinds[0]
    more: dict[str, Any] = {"help": argparse.SUPPRESS if text is None else _help(setting, text)}
    name = option(setting.name)
    if setting.kinds == (bool,):
        action = parser.add_argument(name, action=argparse.BooleanOptionalAction, **more)
        action.help = more["help"]  # to which Python 3.10 adds the default
        return
    if setting.many:
        more["nargs"] = "+" if required else "*"
    if positional := setting.mark(Positional):
        more = {"nargs": None if required else "?", "metavar": positional.metavar, **more}
        parser.add_argument(setting.name, type=_reader(setting, positional.metavar), **more)
    else:
        words = "{" + ",".join(setting.words) + "}" if isinstance(first, str) else "TEXT"
        more |= {"required": required, "metavar": _METAVARS.get(first, words)}
        parser.add_argument(name, type=_reader(setting, name), **more)


def _reader(setting: Setting, name: str) -> Callable[[str], Any]:
    """A function that reads a value, or an item of a list; "None" is None if that is allowed."""
    number = setting.kinds[0] if setting.kinds[0] in _METAVARS else str

    def read(word: str) -> Any:
        if word is argparse.SUPPRESS:  # the default of a positional argument
            return word
        if setting.optional and word == "None":
            return None
        value: Any = word
        if word:  # as an empty variable is no path: Path("") is the working directory
            with contextlib.suppress(ValueError):
                value = number(word)
        if expected := setting.problem((value,) if setting.many else value):
            raise UsageError(f"{name} {word}: expected {expected}")
        return value

    return read


def _help(setting: Setting, text: str) -> str:
    """The text of an option's help: its docstring, computed texts, and the default."""
    parts = [text, *(mark for mark in setting.marks if isinstance(mark, str))]
    if setting.default not in (MISSING, None, False, "", ()):
        parts.append(f"(default: {'on' if setting.default is True else shown(setting.default)})")
    return " ".join(parts).replace("%", "%%")


def option_texts(cls: type) -> dict[str, str]:
    """The docstring below each field."""
    tree: Any = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    found = {}
    for statement, below in zip(tree.body[0].body, tree.body[0].body[1:], strict=False):
        if isinstance(statement, ast.AnnAssign) and isinstance(below, ast.Expr):
            found[ast.unparse(statement.target)] = ast.literal_eval(below.value)
    return found
