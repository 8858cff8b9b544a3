"""Options of dataclasses: what words mean, and what is wrong about them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import BeforeValidator, Field, PositiveInt
from pydantic.dataclasses import dataclass

from megabatch.errors import UsageError
from megabatch.options import CONFIG, parse, parse_bytes


@dataclass(frozen=True, config=CONFIG)
class Settings:
    """Set something.

    At length.
    """

    places: tuple[Path, ...]
    """Where."""
    output: Path
    """Where to."""
    batch_size: PositiveInt | Literal["auto"] = 4
    """Pairs, 100% of them; see also --learning-rate and --batch-size."""
    learning_rate: float | None = None
    """Default: none."""
    kind: Literal["one", "two"] = "one"
    """Which kind."""
    names: tuple[str, ...] = ("a", "b")
    """Some names."""
    sizes: tuple[PositiveInt, ...] = ()
    """Some sizes."""
    check: bool = True
    """Look first."""
    share: Annotated[float, Field(ge=0, lt=1)] = 0.5
    """Of everything."""
    memory: Annotated[int, BeforeValidator(parse_bytes)] | None = None
    """How much."""


def read(words: str) -> Settings:
    return parse(Settings, words.split(), prog="prog", positional="places")


@pytest.mark.parametrize(
    ("words", "given"),
    [
        ("", {}),
        ("--batch-size 8", {"batch_size": 8}),
        ("--batch-size=auto", {"batch_size": "auto"}),
        ("--learning-rate=-1e-3", {"learning_rate": -1e-3}),
        ("--learning-rate None", {"learning_rate": None}),
        ("--kind two --kind one", {"kind": "one"}),
        ("--names x y_z --check", {"names": ("x", "y_z"), "check": True}),
        ("--names", {"names": ()}),
        ("--sizes 1 2", {"sizes": (1, 2)}),
        ("--no-check", {"check": False}),
        ("--share 0", {"share": 0.0}),
        ("--memory 80GiB", {"memory": 80 << 30}),
        ("--memory 1.5M", {"memory": 3 << 19}),
        ("--memory 12", {"memory": 12}),
    ],
)
def test_what_words_mean(words: str, given: dict[str, Any]) -> None:
    expected = Settings(**{"places": (Path("a"), Path("b")), "output": Path("x"), **given})
    assert read(f"a b --output x {words}") == read(f"--output=x {words} -- a b") == expected
    for name, value in given.items():
        assert type(getattr(expected, name)) is type(value)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--batch-size 0", "--batch-size 0: expected greater than 0 or expected 'auto'"),
        ("--learning-rate fast", "--learning-rate fast: expected a valid number, unable to"),
        ("--learning-rate nan", "--learning-rate nan: expected a finite number"),
        ("--kind tow", "--kind tow: expected 'one' or 'two'; did you mean two?"),
        ("--sizes 1 0", "--sizes 0: expected greater than 0"),
        (
            "--share 1 --kind x",
            "several things:\n  - --kind x: expected 'one' or 'two'\n  - --share",
        ),
        ("--memory 80GB", "--memory 80GB: expected a size such as 20GiB"),
        ("--output=", "--output: expected a value, got an empty one"),
        ("--size 8", "--size: no such option; did you mean --sizes or --batch-size?"),
        (
            "-x --qqqq=3",
            "several things:\n  - -x: no such option; --help lists all\n  - --qqqq: no",
        ),
    ],
)
def test_what_is_wrong_is_told(words: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        read(f"a --output x {words}")
    assert str(caught.value).startswith(message)


def test_what_is_needed_is_told() -> None:
    with pytest.raises(UsageError, match="the following arguments are required: PLACES, --output"):
        read("")


def test_help(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    with pytest.raises(SystemExit) as left:
        read("--batch-size 3 --help")
    assert left.value.code == 0
    out = capsys.readouterr().out
    pad, names = "\n" + 23 * " ", "--learning-rate and --batch-size."
    for line in (
        "usage: prog [OPTIONS]\n\nSet something.\n\nAt length.\n\npositional arguments:\n  PLACES ",
        f"  --batch-size N       Pairs, 100% of them; see also{pad}{names}",
        f"{pad}(default: 4)\n  --learning-rate X    Default: none.\n",
        "  --kind {one,two}     Which kind. (default: one)\n",
        "  --sizes [N ...]      Some sizes.\n  --check, --no-check  Look first. (default: on)\n",
        "  --share X            Of everything. (default: 0.5)\n",
    ):
        assert line in out
