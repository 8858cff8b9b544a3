"""The first signal is noted, the second one acts, and all is as before afterwards."""

from __future__ import annotations

import os
import signal

import pytest

from megabatch.training.interrupt import Interrupt


def test_the_first_is_noted_and_the_second_ends_it() -> None:
    with Interrupt() as interrupt:
        assert interrupt.received is None
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupt.received == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_handlers_are_put_back() -> None:
    before = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    with Interrupt() as interrupt:
        os.kill(os.getpid(), signal.SIGTERM)
        assert interrupt.received == signal.SIGTERM
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == before
