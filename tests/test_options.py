"""Options of dataclasses: what words mean, and what is wrong about them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest

from megabatch.errors import UsageError
from megabatch.hints import Details, Interval
from megabatch.options import Parser, Positional, parse, parse_one_of


@dataclass(frozen=True)
class Settings:
    """What there is to set."""

    place: Annotated[Path | None, Positional("PLACE")] = None
    """Where."""
    batch_size: int = 4
    """Pairs, 100% of them; see also learning_rate and batch_size."""
    learning_rate: float | None = None
    """Default: none."""
    kind: Literal["one", "two"] = "one"
    """Which kind."""
    names: tuple[str, ...] = ("a", "b")
    """Some names."""
    sizes: tuple[int, ...] = ()
    """Some sizes."""
    check: bool = True
    """Look first."""
    share: Annotated[float, Interval(at_least=0, below=1), Details("Less is more.")] = 0.5
    """Of everything."""


PARSER = Parser(
    (Settings,),
    "prog",
    "A program.",
    groups={"learning_rate": "rates"},
    elsewhere={"--old": "use --kind two"},
    values={"kind": {"three": "use --kind two twice"}, "check": {"yes": "leave it out"}},
)


@pytest.mark.parametrize(
    ("words", "given"),
    [
        ("", {}),
        ("here", {"place": Path("here")}),
        ("--batch-size 8 here", {"batch_size": 8, "place": Path("here")}),
        ("--batch_size=8", {"batch_size": 8}),
        ("--batch-size -8", {"batch_size": -8}),
        ("--learning-rate -1e-3", {"learning_rate": -1e-3}),
        ("--learning-rate=1", {"learning_rate": 1.0}),
        ("--learning-rate None", {"learning_rate": None}),
        ("--kind two --kind one", {"kind": "one"}),
        ("--names x y_z --check", {"names": ("x", "y_z"), "check": True}),
        ("--names", {"names": ()}),
        ("--sizes 1 2", {"sizes": (1, 2)}),
        ("--no-check", {"check": False}),
        ("--no_check", {"check": False}),
        ("--share 0", {"share": 0.0}),
    ],
)
def test_what_words_mean(words: str, given: dict[str, Any]) -> None:
    assert PARSER.parse(words.split()) == given


def test_words_keep_their_types() -> None:
    assert isinstance(PARSER.parse(["--learning-rate=1"])["learning_rate"], float)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--batch-size 1.5", "--batch-size 1.5: expected a whole number"),
        ("--learning-rate fast", "--learning-rate fast: expected a number"),
        ("--kind four", "--kind four: expected 'one' or 'two'"),
        ("--kind three", "--kind three: use --kind two twice"),
        ("--sizes 1 x", "--sizes 1 x: expected a list, each a whole number"),
        ("--share 1", "--share 1: expected at least 0 and below 1"),
        ("--share nan", "--share nan: expected at least 0 and below 1"),
        ("--batch-size", "--batch-size: expected one argument"),
        ("--batchsize 8", "--batchsize: no such option; did you mean --batch-size?"),
        ("--batch 8", "--batch: no such option; did you mean --batch-size?"),
        ("--qqqqqq", "--qqqqqq: no such option; see prog --help"),
        ("-x", "-x: no such option; see prog --help"),
        ("--old", "--old: use --kind two"),
        ("--old=5", "--old: use --kind two"),
        ("here there", "'there': not expected after here; options begin with --"),
        ("here --check yes", "--check yes: leave it out"),
        (
            "--old --qqqqqq 3 --batch-size x",
            "several things:\n  - --old: use --kind two\n  - --qqqqqq: no such option; see "
            "prog --help\n  - --batch-size x: expected a whole number",
        ),
    ],
)
def test_what_is_wrong_is_told(words: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        PARSER.parse(words.split())
    assert str(caught.value) == message


def test_an_empty_path_is_none() -> None:
    with pytest.raises(UsageError, match=r"^PLACE : expected a path$"):
        PARSER.parse([""])


def test_help(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    with pytest.raises(SystemExit) as left:
        PARSER.parse(["--batch-size", "3", "--help"])
    assert left.value.code == 0
    assert capsys.readouterr().out == (
        "usage: prog [OPTIONS]\n\nA program.\n\n"
        "positional arguments:\n  PLACE\n      Where.\n\n"
        "options:\n"
        "  --batch-size N\n"
        "      Pairs, 100% of them; see also --learning-rate and\n"
        "      --batch-size. (default: 4)\n"
        "  -h, --help\n      Show this text.\n\n"
        "rates:\n"
        "  --learning-rate X\n      Default: none.\n"
        "  --kind {one,two}\n      Which kind. (default: one)\n"
        "  --names TEXT ...\n      Some names. (default: a b)\n"
        "  --sizes N ...\n      Some sizes.\n"
        "  --check, --no-check\n      Look first. (default: on)\n"
        "  --share X\n      Of everything. Less is more. (default: 0.5)\n"
    )


@dataclass(frozen=True)
class Needing:
    """Write something.

    At length.
    """

    output: Path
    """Where to."""


def test_what_is_needed_is_asked_for() -> None:
    assert parse(Needing, ["--output", "x"], prog="p", description="").output == Path("x")
    with pytest.raises(UsageError, match="--output: needed, but not given"):
        parse(Needing, [], prog="p", description="")


def test_one_of_several_commands(capsys: pytest.CaptureFixture[str]) -> None:
    commands: dict[str, Any] = {"set": Settings, "write": Needing}

    def read(*words: str) -> object:
        return parse_one_of(commands, words, prog="p", description="Do it.")

    assert read("write", "--output", "x") == Needing(Path("x"))
    with pytest.raises(UsageError, match="'wirte' is not a command; expected set or write"):
        read("wirte")
    for words, code in (([], 2), (["--help"], 0)):
        with pytest.raises(SystemExit) as left:
            read(*words)
        assert left.value.code == code
        assert "  write     Write something.\n" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        read("write", "--help")
    assert "usage: p write [OPTIONS]\n\nWrite something.\n\nAt length.\n" in capsys.readouterr().out


@dataclass(frozen=True)
class Places:
    """What several places there are."""

    places: Annotated[tuple[Path, ...], Positional("PLACE")]
    """Where."""
    batch_size: int = 4
    """Pairs."""


def test_a_positional_list_takes_all_words_before_an_option() -> None:
    words = ["a", "b", "--batch-size", "3"]
    got = parse(Places, words, prog="test", description="")
    assert got == Places((Path("a"), Path("b")), 3)
    got = parse(Places, ["--batch-size", "3", "a"], prog="test", description="")
    assert got.places == (Path("a"),)
    with pytest.raises(UsageError, match="PLACE: needed, but not given"):
        parse(Places, ["--batch-size", "3"], prog="test", description="")
