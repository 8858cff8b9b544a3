"""The thread that prefetches; gradient_cache/test_batches.py shows its order and its errors."""

from __future__ import annotations

import subprocess
import sys


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
