"""Options of dataclasses: what words mean, and what is wrong about them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest

from megabatch.errors import UsageError
from megabatch.hints import SIZE, Interval, Positional, parse_bytes
from megabatch.options import Parser, parse


@dataclass(frozen=True)
class Settings:
    """What there is to set."""

    place: Annotated[Path | None, Positional("PLACE")] = None
    """Where."""
    batch_size: int = 4
    """Pairs, 100% of them; see also --learning-rate and --batch-size."""
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
    share: Annotated[float, Interval(at_least=0, below=1), "Less is more."] = 0.5
    """Of everything."""


PARSER = Parser(
    (Settings,),
    "prog",
    "A program.",
    elsewhere={"--old-size": "use --batch-size"},
)


@pytest.mark.parametrize(
    ("words", "given"),
    [
        ("", {}),
        ("here", {"place": Path("here")}),
        ("--batch-size 8 here", {"batch_size": 8, "place": Path("here")}),
        ("--batch-size=8", {"batch_size": 8}),
        ("--batch-size -8", {"batch_size": -8}),
        ("--learning-rate=-1e-3", {"learning_rate": -1e-3}),
        ("--learning-rate 1", {"learning_rate": 1.0}),
        ("--learning-rate None", {"learning_rate": None}),
        ("--kind two --kind one", {"kind": "one"}),
        ("--names x y_z --check", {"names": ("x", "y_z"), "check": True}),
        ("--names", {"names": ()}),
        ("--sizes 1 2", {"sizes": (1, 2)}),
        ("--no-check", {"check": False}),
        ("--share 0", {"share": 0.0}),
    ],
)
def test_what_words_mean(words: str, given: dict[str, Any]) -> None:
    found = PARSER.parse(words.split())
    assert found == given
    assert [type(value) for value in found.values()] == [type(value) for value in given.values()]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--batch-size 1.5", "--batch-size 1.5: expected a whole number"),
        ("--learning-rate fast", "--learning-rate fast: expected a number"),
        ("--kind tow", "--kind tow: expected 'one' or 'two'; did you mean two?"),
        ("--sizes 1 x", "--sizes x: expected a list, each a whole number"),
        ("--share 1", "--share 1: expected at least 0 and below 1"),
        ("--share nan", "--share nan: expected at least 0 and below 1"),
        ("--batch-size", "--batch-size: expected one argument"),
        ("--batchsize 8", "--batchsize: no such option; did you mean --batch-size?"),
        ("--batch_size 8", "--batch_size: no such option; did you mean --batch-size?"),
        ("--batch 8", "--batch: no such option; did you mean --batch-size?"),
        ("-x", "-x: no such option; see prog --help"),
        ("--old-size=5", "--old-size: no such option; use --batch-size"),
        ("--oldsize 5", "--oldsize: no such option; use --batch-size"),
        ("here there", "'there': not expected; options begin with --"),
        (
            "--old-size 4 --qqqqqq 3",
            "several things:\n  - --old-size: no such option; use --batch-size\n"
            "  - --qqqqqq: no such option; see prog --help",
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
    out = capsys.readouterr().out
    pad = "\n" + 23 * " "
    names = "--learning-rate and --batch-size."
    for line in (
        "usage: prog [OPTIONS]\n\nA program.\n\npositional arguments:\n  PLACE ",
        f"  --batch-size N       Pairs, 100% of them; see also{pad}{names}",
        f"{pad}(default: 4)\n  --learning-rate X    Default: none.\n",
        "  --kind {one,two}     Which kind. (default: one)\n",
        "  --sizes [N ...]      Some sizes.\n  --check, --no-check  Look first. (default: on)\n",
        f"  --share X            Of everything. Less is more.{pad}(default: 0.5)\n",
    ):
        assert line in out


@dataclass(frozen=True)
class Needing:
    """Write something.

    At length.
    """

    places: Annotated[tuple[Path, ...], Positional("PLACE")]
    """Where."""
    output: Path
    """Where to."""
    batch_size: int = 4
    """Pairs."""


def test_a_class_is_made_of_what_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    expected = Needing((Path("a"), Path("b")), Path("x"), 3)
    assert parse(Needing, ["a", "b", "--output", "x", "--batch-size", "3"], prog="p") == expected
    assert parse(Needing, ["--output", "x", "--batch-size", "3", "a", "b"], prog="p") == expected
    with pytest.raises(UsageError, match="the following arguments are required: PLACE, --output"):
        parse(Needing, [], prog="p")
    with pytest.raises(SystemExit):
        parse(Needing, ["--help"], prog="p write")
    assert "usage: p write [OPTIONS]\n\nWrite something.\n\nAt length.\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "size"), [("80GiB", 80 << 30), ("80G", 80 << 30), ("1.5M", 3 << 19), ("12", 12)]
)
def test_sizes(text: str, size: int) -> None:
    assert parse_bytes(text) == size
    assert re.fullmatch(SIZE, "80GB") is None
