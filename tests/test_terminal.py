from __future__ import annotations

import os
import sys

import pytest

from megabatch.terminal import plain_console


def test_text_is_printed_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    text = "[/b] [red] :cat: 'x' 1 " + "word " * 39 + "word"
    plain_console().print(text)
    assert capsys.readouterr().out == text + "\n"
    plain_console(stderr=True).print(text)
    assert capsys.readouterr().err == text + "\n"
    plain_console(quiet=True).print(text)
    assert capsys.readouterr().out == ""


def test_a_reader_that_is_gone_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        console = plain_console()
        console.print("one")
        console.print("two")
        assert console.quiet
