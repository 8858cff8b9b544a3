"""The bar on a terminal, lines elsewhere."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from megabatch.training import display
from megabatch.training.display import Display, duration


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(display.time, "monotonic", lambda: now[0])
    return now


def record(loss: float, speed: float, gib: int) -> dict[str, float]:
    return {"loss": loss, "pairs_per_second": speed, "memory_bytes": gib * 2**30}


def test_a_file_gets_a_line_every_ten_seconds_and_one_at_the_end(clock: list[float]) -> None:
    file = io.StringIO()
    with Display(Console(file=file), total_steps=105, done=5) as shown:
        for step in range(6, 106):
            clock[0] += 1
            shown.update(step, record(2.5, 1234.4, 3))
    lines = file.getvalue().splitlines()
    assert len(lines) == 10
    assert lines[0] == "step 15/105  loss 2.500  1,234 pairs/s  3.0 GiB  1m 30s left"
    assert lines[-1].startswith("step 105/105")


def test_a_terminal_gets_a_bar() -> None:
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=100)
    with Display(console, total_steps=4, done=0) as shown:
        shown.update(1, record(2.5, 10.0, 1))
    text = file.getvalue()
    assert "1/4" in text
    assert "loss 2.500" in text
    assert "10 pairs/s" in text
    assert "1.0 GiB" in text


def test_a_step_that_was_left_out_has_no_loss(clock: list[float]) -> None:
    file = io.StringIO()
    with Display(Console(file=file), total_steps=1, done=0) as shown:
        clock[0] += 1
        shown.update(1, {"pairs_per_second": 1.0, "memory_bytes": 0})
    assert "loss not finite" in file.getvalue()


def test_a_quiet_console_gets_nothing() -> None:
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, quiet=True)
    with Display(console, total_steps=1, done=0) as shown:
        shown.update(1, record(2.5, 10.0, 1))
    assert file.getvalue() == ""


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0, "0s"), (59.4, "59s"), (59.6, "1m 00s"), (125, "2m 05s"), (11_220, "3h 07m")],
)
def test_durations_in_words(seconds: float, words: str) -> None:
    assert duration(seconds) == words
