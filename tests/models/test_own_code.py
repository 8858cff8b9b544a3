"""References to the user's own code: their form, their import, their calls."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megabatch.errors import UsageError
from megabatch.models import own_code
from megabatch.options import is_reference
from tests.own_parts import WriteModule, user_modules


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WriteModule]:
    with user_modules(tmp_path, monkeypatch) as written:
        yield written


def test_references() -> None:
    for value in ("mine:Loss", "a.b_2.c:make", "größe:Verlust"):
        assert is_reference(value), value
    names = ("clip", "ViT-B-32", "hf:folder", "local-dir:folder", "local-dir:/a/b")
    broken = ("mine:", ":Loss", "mine:a.b", "mine:a:b", "a-b:c", "2a:b", ".a:b", "a..b:c", "a:b\n")
    for other in (*names, *broken, None, 3, Path("a:b")):
        assert not is_reference(other), other


def test_modules_come_from_the_working_directory_and_from_what_is_installed(
    write: WriteModule, tmp_path: Path
) -> None:
    assert str(tmp_path) not in sys.path
    write("user_module", "def make(): return 3\n")
    assert own_code.load("user_module:make", "loss")() == 3
    assert own_code.load("pathlib:Path", "loss") is Path


@pytest.mark.parametrize(
    ("source", "reference", "message"),
    [
        ("", "user_module.part:Loss", "importing user_module.part, installed or in "),
        ("class Loss: pass", "user_module:loss", "function loss; did you mean Loss?"),
        ("Loss = 3", "user_module:Loss", "user_module has no class or function Loss"),
        ("import user_library", "user_module:Loss", "Error: No module named 'user_library' ("),
        ("\n1 / 0", "user_module:Loss", "ZeroDivisionError: division by zero ("),
        ("def (", "user_module:Loss", "SyntaxError: "),
    ],
)
def test_a_module_or_name_that_cannot_be_used_says_why(
    write: WriteModule, source: str, reference: str, message: str
) -> None:
    path = write("user_module", source)
    with pytest.raises(UsageError) as caught:
        own_code.load(reference, "loss")
    assert message in str(caught.value)
    assert str(caught.value).startswith(f"--loss {reference}: ")
    if "1 / 0" in source:
        assert f"({path}, line 2)" in str(caught.value)


def test_a_call_gets_the_arguments_that_it_has_and_its_errors_name_their_place() -> None:
    def divide(a: int, b: int = 0) -> float:
        return a / b

    def anything(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        return args, kwargs

    assert own_code.call(anything, "--loss m:f", a=1) == ((), {})
    assert own_code.call(divide, "--loss m:f", a=4, b=2, c=3) == 2
    with pytest.raises(UsageError, match=r"^--loss m:f: it needs a; expected parameters with"):
        own_code.call(divide, "--loss m:f", b=1)
    with pytest.raises(UsageError, match=r"^--loss m:f: ZeroDivisionError: .*test_own_code.py, "):
        own_code.call(divide, "--loss m:f", a=1)
