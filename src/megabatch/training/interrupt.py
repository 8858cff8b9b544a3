"""Signals that request a graceful stop: the step is finished and a checkpoint written."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from types import FrameType

#: Windows has no SIGUSR1.
_SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGUSR1") if hasattr(signal, name)
)
_TEMPORARY_FAILURE = 75  # os.EX_TEMPFAIL, which Windows lacks


@contextlib.contextmanager
def signals_recorded(*, announce: bool = False) -> Iterator[list[int]]:
    """A context in which SIGINT, SIGTERM and SIGUSR1 are recorded and otherwise ignored.

    A second SIGINT, which comes from an impatient user, has its usual effect. Schedulers may repeat
    their signals, which has none.

    Args:
        announce: say on stderr what follows, as the step may take minutes.

    Yields:
        The numbers of the signals so far.
    """
    received: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if announce and not received:
            _say_what_follows(number)
        received.append(number)
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, before[signal.SIGINT])

    before = {number: signal.signal(number, note) for number in _SIGNALS}
    try:
        yield received
    finally:
        for number, own in before.items():
            signal.signal(number, own)


def exit_code(number: int) -> int:
    """The exit code after a signal and a checkpoint: 130 after Ctrl-C, else 75 (EX_TEMPFAIL).

    No process that a signal kills, and no shell that reports one, exits with 75, so it implies that
    there is a checkpoint.
    """
    return 128 + signal.SIGINT if number == signal.SIGINT else _TEMPORARY_FAILURE


def _say_what_follows(number: int) -> None:
    line = "finishing this step and saving a checkpoint"
    if number == signal.SIGINT:
        line += "; Ctrl-C again ends the run at once, without one"
    # Not by `print`, which the signal may have interrupted.
    with contextlib.suppress(OSError):
        os.write(2, f"\n{signal.Signals(number).name}: {line}\n".encode())
