"""A thread that makes the next thing while the caller works with the one before."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from megabatch.ahead import one_ahead

NAME = "one-ahead"


def working() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith(NAME)]


def test_each_in_order_by_another_thread():
    made = list(one_ahead(lambda i: (i, threading.current_thread().name), range(4), NAME))
    assert made == [(i, f"{NAME}_0") for i in range(4)]
    assert list(one_ahead(str, [], NAME)) == []
    assert not working()


def test_one_ahead_and_no_more():
    begun: list[int] = []
    second = threading.Event()

    def make(i: int) -> int:
        begun.append(i)
        if i == 1:
            second.set()
        return i

    things = one_ahead(make, range(5), NAME)
    assert next(things) == 0
    assert second.wait(5)
    things.close()
    assert begun == [0, 1]
    assert not working()


def test_an_error_comes_in_its_turn():
    things = one_ahead(lambda i: 1 // i, [1, 0, 1], NAME)
    assert next(things) == 1
    with pytest.raises(ZeroDivisionError):
        next(things)
    assert not working()


def test_a_process_may_end_while_the_thread_is_at_work():
    code = """
import threading, time
from megabatch.ahead import one_ahead
begun = threading.Event()
def make(i):
    if i:
        begun.set()
        time.sleep(0.3)
    return i
things = one_ahead(make, range(2), "ahead")
next(things)
begun.wait()
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, "")
