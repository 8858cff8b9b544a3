"""Signals that request a graceful stop: the step is finished and a checkpoint written."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any, NoReturn

#: EX_TEMPFAIL of sysexits.h: run the same command again. No process that a signal kills, and no
#: shell that reports one, exits with it, so it implies that there is a checkpoint.
EX_TEMPFAIL = 75

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class Interrupt:
    """A context in which SIGINT, SIGTERM and SIGUSR1 are recorded and otherwise ignored.

    A second SIGINT, which comes from an impatient user, has its usual effect. Schedulers may repeat
    their signals, which has none.

    Args:
        announce: say on stderr what follows, as the step may take minutes.

    Attributes:
        received: number of the first signal, or 0.
    """

    def __init__(self, announce: bool = False) -> None:
        self.announce = announce
        self.received = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupt:
        for number in _SIGNALS:
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.announce and not self.received:
            _say_what_follows(number)
        self.received = self.received or number
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, self._before[signal.SIGINT])


def _say_what_follows(number: int) -> None:
    line = "finishing this step and saving a checkpoint"
    if number == signal.SIGINT:
        line += "; Ctrl-C again ends the run at once, without one"
    # The signal may have come while a print was writing to sys.stderr's buffer, which would raise
    # an error; it has no descriptor in a notebook.
    with contextlib.suppress(OSError, ValueError, AttributeError):
        os.write(sys.stderr.fileno(), f"\n{signal.Signals(number).name}: {line}\n".encode())


class Ended(SystemExit):
    """A signal came after the last checkpoint; its code is that of an interrupted run."""


@contextlib.contextmanager
def signals_end() -> Iterator[None]:
    """A context in which SIGINT, SIGTERM and SIGUSR1 raise `Ended`."""
    before = {number: signal.signal(number, _end) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end(number: int, frame: FrameType | None) -> NoReturn:
    raise Ended(exit_code(number))


def exit_code(number: int) -> int:
    """The exit code after a signal and a checkpoint: 130 after Ctrl-C, else 75."""
    return 128 + signal.SIGINT if number == signal.SIGINT else EX_TEMPFAIL
