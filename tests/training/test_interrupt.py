"""The first signal is noted, the second one acts, and all is as before afterwards."""

from __future__ import annotations

import io
import os
import signal

import pytest

from megabatch.training.interrupt import exit_code, signals_recorded


def test_the_first_is_noted_and_a_second_ctrl_c_ends_it() -> None:
    before = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)]
    with signals_recorded() as received:
        for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGTERM):  # as schedulers do
            os.kill(os.getpid(), number)
        assert received[:2] == [signal.SIGUSR1, signal.SIGTERM]
        os.kill(os.getpid(), signal.SIGINT)
        assert received[-1] == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)] == before
    assert [exit_code(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)] == [130, 75, 75]


def test_what_follows_is_said_once(capfd: pytest.CaptureFixture[str]) -> None:
    with signals_recorded(announce=True):
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
    said = "\nSIGTERM: finishing this step and saving a checkpoint\n"
    assert capfd.readouterr().err == said


@pytest.mark.parametrize("stream", [None, io.StringIO()])
def test_nothing_is_said_where_there_is_no_stream(
    monkeypatch: pytest.MonkeyPatch, stream: io.StringIO | None
) -> None:
    monkeypatch.setattr("sys.stderr", stream)
    with signals_recorded(announce=True) as received:
        os.kill(os.getpid(), signal.SIGINT)
        assert received == [signal.SIGINT]
