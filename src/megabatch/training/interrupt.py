"""Signals ask for an orderly end: the step is finished and a checkpoint written."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Any

#: sysexits.h's EX_TEMPFAIL: the same command may be given again. No process that a signal kills,
#: and no shell that reports one, ends with it: it says that there is a checkpoint.
EX_TEMPFAIL = 75

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class Interrupt:
    """Within this context SIGINT, SIGTERM and SIGUSR1 are only noted.

    But a second SIGINT, which comes from somebody who waits, ends at once; schedulers may repeat
    theirs, and wait for what was begun.

    `received`: the first signal's number, or 0.
    """

    def __init__(self) -> None:
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
        self.received = self.received or number
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, self._before[signal.SIGINT])


def exit_code(number: int) -> int:
    """What to end with after a signal and a checkpoint: 130 after Ctrl-C, else 75."""
    return 128 + signal.SIGINT if number == signal.SIGINT else EX_TEMPFAIL
