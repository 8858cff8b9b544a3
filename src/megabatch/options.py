"""Command-line options from dataclasses: a field is an option, its docstring the help."""

from __future__ import annotations

import argparse
import ast
import difflib
import inspect
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field
from fnmatch import fnmatchcase
from typing import Any, NoReturn, TypeVar

from megabatch.errors import UsageError, all_of, did_you_mean
from megabatch.hints import Details, Positional, Setting, option, settings_of, shown

T = TypeVar("T")

_NARROWEST, _WIDEST = 60, 100  # columns of a help text


@dataclass
class Parser:
    """Parses the options of one command.

    Args:
        classes: dataclasses whose fields are the options; a bool is `--name` and `--no-name`.
        prog, description: for the help.
        groups: headings of the help, by the first field below each.
        elsewhere: options of other programs, each with its replacement; `*` stands for any text.
        values: by field, values that other programs accept, likewise.
        common: fields that `--help` lists, while `--help-all` lists all; none: both list all.
    """

    classes: Sequence[type]
    prog: str
    description: str
    groups: Mapping[str, str] = field(default_factory=dict)
    elsewhere: Mapping[str, str] = field(default_factory=dict)
    values: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    common: Collection[str] = ()

    def parse(self, argv: Sequence[str]) -> dict[str, Any]:
        """The values of the options that were given, by field.

        Raises:
            UsageError: options do not exist or have invalid values; one message for all.
            SystemExit: after `--help`, which is printed.
        """
        words = [_normalized(word) for word in _joined(argv)]
        short = bool(self.common) and "--help-all" not in words
        read, unknown = self._build(short).parse_known_args(words)
        reasons = list(self._unknown(words, unknown))
        given: dict[str, Any] = {}
        for name, word in vars(read).items():
            setting = self._settings[name]
            try:
                given[name] = setting.parse(word)
            except ValueError as error:
                advice = self.values.get(name, {}).get(str(word))
                expected = f"expected {error}" if advice is None else advice
                reasons.append(f"{_label(setting)} {_typed(word)}: {expected}")
        if reasons:
            raise UsageError(all_of(reasons))
        return given

    def _build(self, short: bool) -> argparse.ArgumentParser:
        """argparse's parser, with the help of all options or, in short, of the common ones."""
        parser = _Arguments(
            prog=self.prog,
            usage=f"{self.prog} [OPTIONS]",
            description=self.description,
            formatter_class=_Help,
            allow_abbrev=False,
            add_help=False,
        )
        group: Any = parser
        texts = _texts(self.classes)
        for name, setting in self._settings.items():
            if name in self.groups and not short:
                group = parser.add_argument_group(self.groups[name])
            details = setting.mark(Details)
            text = " ".join([texts.get(name, ""), details.text if details else ""]).strip()
            text = (_spelled(text, self._settings) + _default(setting)).strip().replace("%", "%%")
            _add(group, setting, argparse.SUPPRESS if short and name not in self.common else text)
        about = "Show common options." if self.common else "Show this text."
        parser.add_argument("-h", "--help", action="help", help=about)
        if self.common:
            about = f"Show all {len(self._settings)} options."
            parser.add_argument("--help-all", action="help", help=about)
        return parser

    @property
    def _settings(self) -> dict[str, Setting]:
        return {name: one for cls in self.classes for name, one in settings_of(cls).items()}

    def _unknown(self, words: Sequence[str], unknown: Sequence[str]) -> Iterator[str]:
        for i, word in enumerate(unknown):
            name = word.partition("=")[0]
            advice = next((a for p, a in self.elsewhere.items() if fnmatchcase(name, p)), None)
            if advice is not None:
                yield f"{name}: {advice}"
            elif name.startswith("-"):
                # A misspelt option of another program means that one: `--batchsize`.
                known = [*map(option, self._settings), *self.elsewhere]
                close = next(iter(difflib.get_close_matches(name, known, n=1)), "")
                meant = f"did you mean {close}?" if close else f"see {self.prog} --help"
                yield f"{name}: no such option; {self.elsewhere.get(close, meant)}"
            elif i == 0 or not unknown[i - 1].startswith("-"):  # not an unknown option's value
                before = words[words.index(word) - 1] if words.index(word) else ""
                field_name = before.removeprefix("--").replace("-", "_")
                if advice := self.values.get(field_name, {}).get(word):
                    yield f"{before} {word}: {advice}"
                else:
                    after = f" after {before}" if before else ""
                    yield f"{word!r}: not expected{after}; options begin with --"


def parse(cls: Callable[..., T], argv: Sequence[str], *, prog: str, description: str) -> T:
    """Parse a command's options into an instance of the dataclass that declares them.

    Raises:
        UsageError, SystemExit: as `Parser.parse`; also if an option without a default is missing.
    """
    assert isinstance(cls, type)
    given = Parser((cls,), prog, description, groups=getattr(cls, "GROUPS", {})).parse(argv)
    for name, setting in settings_of(cls).items():
        if setting.default is MISSING and name not in given:
            raise UsageError(f"{_label(setting)}: needed, but not given")
    return cls(**given)


def parse_one_of(
    commands: Mapping[str, Callable[..., T]], argv: Sequence[str], *, prog: str, description: str
) -> T:
    """Parse the options of the subcommand that the first word names.

    Raises:
        UsageError, SystemExit: as `parse`; also if there is no such subcommand.
    """
    lines = [
        _wrapped(_summary(cls), _width(), f"  {name:<10}", " " * 12)
        for name, cls in commands.items()
    ]
    listed = [line for wrapped in lines for line in wrapped]
    usage = "\n".join([f"usage: {prog} COMMAND [OPTIONS]", "", description, "", *listed])
    if not argv or argv[0] in ("-h", "--help"):
        print(usage)
        raise SystemExit(0 if argv else 2)
    name = argv[0]
    if name not in commands:
        hint = did_you_mean(name, commands)
        raise UsageError(f"{name!r} is not a command; expected {' or '.join(commands)}{hint}")
    cls = commands[name]
    return parse(cls, argv[1:], prog=f"{prog} {name}", description=inspect.getdoc(cls) or "")


class _Arguments(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message.removeprefix("argument "))


class _Help(argparse.HelpFormatter):
    """Each option on its own line with its text below, wrapped at spaces only."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, indent_increment=2, max_help_position=6, width=_width())

    def _split_lines(self, text: str, width: int) -> list[str]:
        return _wrapped(text, width)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n\n".join("\n".join(_wrapped(part, width)) for part in text.split("\n\n"))

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings or action.nargs == 0:
            return ", ".join(action.option_strings) or str(action.metavar)
        values = " ..." if action.nargs == "*" else ""
        return f"{action.option_strings[0]} {action.metavar}{values}"


def _width() -> int:
    """Columns of the help: the terminal's, within bounds."""
    known = "COLUMNS" in os.environ or sys.stdout.isatty()
    columns = shutil.get_terminal_size().columns if known else _WIDEST
    return max(_NARROWEST, min(columns, _WIDEST))


def _wrapped(text: str, width: int, first: str = "", others: str = "") -> list[str]:
    return textwrap.wrap(
        " ".join(text.split()),
        width,
        initial_indent=first,
        subsequent_indent=others,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _add(group: Any, setting: Setting, text: str) -> None:
    name = setting.name
    more: dict[str, Any] = {"default": argparse.SUPPRESS, "help": text}
    if positional := setting.mark(Positional):
        nargs = "*" if setting.many else "?"
        group.add_argument(name, nargs=nargs, metavar=positional.metavar, **more)
    elif setting.kinds == (bool,):
        flag = group.add_argument(option(name), action=argparse.BooleanOptionalAction, **more)
        flag.help = text  # to which Python 3.10 adds the default
    else:
        if setting.many:
            more["nargs"] = "*"
        group.add_argument(option(name), dest=name, metavar=setting.placeholder, **more)


def _label(setting: Setting) -> str:
    positional = setting.mark(Positional)
    return option(setting.name) if positional is None else positional.metavar


def _typed(words: Any) -> str:
    return " ".join(words) if isinstance(words, list) else str(words)


def _joined(argv: Sequence[str]) -> list[str]:
    """Join `--lr -1e-3` to `--lr=-1e-3`, as argparse would take the value for an option."""
    words: list[str] = []
    for word in argv:
        before = words[-1] if words else ""
        if before.startswith("--") and "=" not in before and re.fullmatch(r"-[\d.i].*", word):
            words[-1] = f"{before}={word}"
        else:
            words.append(word)
    return words


def _normalized(word: str) -> str:
    """Accept underscores in options, as configuration files have them."""
    if not word.startswith("--"):
        return word
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value


def _texts(classes: Iterable[type]) -> dict[str, str]:
    """The docstring below each field."""
    found: dict[str, str] = {}
    for cls in classes:
        body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
        assert isinstance(body, ast.ClassDef)
        for statement, below in zip(body.body, body.body[1:], strict=False):
            if (
                isinstance(statement, ast.AnnAssign)
                and isinstance(statement.target, ast.Name)
                and isinstance(below, ast.Expr)
                and isinstance(below.value, ast.Constant)
            ):
                found[statement.target.id] = str(below.value.value)
    return found


def _spelled(text: str, names: Iterable[str]) -> str:
    """Replace names of settings in a text by their options."""
    several = [name for name in names if "_" in name]
    if not several:
        return text
    pattern = rf"(?<![\w-])({'|'.join(sorted(several, key=len, reverse=True))})(?![\w-])"
    return re.sub(pattern, lambda found: option(found[1]), text)


def _default(setting: Setting) -> str:
    value = setting.default
    if value in (MISSING, None, False, "", ()):
        return ""
    return f" (default: {'on' if value is True else shown(value)})"


def _summary(cls: Callable[..., Any]) -> str:
    return (inspect.getdoc(cls) or "").partition("\n")[0]
