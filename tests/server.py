"""A server that has imported torch and more; the processes of tests fork from it.

An interpreter takes seconds to import these libraries. A process that runs tests starts the server
when it first needs it (`forked`). Workers of pytest-xdist share one and, without GPUs, fork from it
themselves: `pytest_xdist_setupnodes` in conftest.py has them start this file, not an interpreter.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import signal
import sys
import threading
import types
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

#: Environment variables that processes start with, unaffected by changes of a test.
ENVIRONMENT = dict(os.environ)
#: The variable with the address, and Python 3.14's key, of a server that another process started.
SHARED = "MEGABATCH_TEST_SERVER"


def forked(target: Callable[..., None], *arguments: Any) -> Any:
    """Fork a process from the server, which has started none of torch's threads.

    Kernels run in Triton's interpreter, also on a machine with GPUs.
    """
    start_server()
    context: Any = multiprocessing.get_context("forkserver")
    process = context.Process(target=target, args=arguments)
    process.start()
    return process


def start_server() -> str:
    """Start the server unless it runs; return what workers find it by, see `SHARED`."""
    server: Any = forkserver._forkserver  # type: ignore[attr-defined]
    if SHARED in ENVIRONMENT:
        address, key = ENVIRONMENT[SHARED].split(",")
        server._forkserver_address, server._forkserver_authkey = address, bytes.fromhex(key)
        server._forkserver_alive_fd = server._forkserver_alive_fd or os.open(
            os.devnull, os.O_RDONLY
        )
        server.ensure_running = lambda: None  # it ends with the process that started it
    else:
        server.set_forkserver_preload(["tests.preloaded"])
        with mock.patch.dict(os.environ, ENVIRONMENT | {"TRITON_INTERPRET": "1"}, clear=True):
            server.ensure_running()
    key = getattr(server, "_forkserver_authkey", None) or b""
    return f"{server._forkserver_address},{key.hex()}"


def run_program(words: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """Go on as `python` does with these words: a file, -m module or -c code, and what it takes."""
    multiprocessing.set_start_method(None, force=True)  # of its own processes, as in any program
    os.environ.clear()
    os.environ.update(environment)
    try:
        _execute(words)
        code = 0
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
        if code and not isinstance(leaving.code, int):
            print(leaving.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        code = 1
    # As the interpreter ends: threads, then what libraries registered.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _execute(words: Sequence[str]) -> None:
    if words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        sys.path.insert(0, "")
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(words[1], "<string>", "exec"), main.__dict__)
    elif words[0] == "-m":
        sys.argv = list(words[1:])
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(words)
        sys.path.insert(0, str(Path(words[0]).parent))
        runpy.run_path(words[0], run_name="__main__")


def _run_worker(
    words: Sequence[str], environment: Mapping[str, str], streams: Sequence[Connection]
) -> None:
    for number, stream in enumerate(streams):
        os.dup2(stream.fileno(), number)
        stream.close()
    sys.stdin = os.fdopen(0, closefd=False)
    ENVIRONMENT.clear()
    ENVIRONMENT.update(environment)
    run_program(words, environment)


if __name__ == "__main__":  # as execnet starts an interpreter: [-B] -u -c CODE
    sys.path[0] = str(Path(__file__).parents[1])
    from tests import server

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the worker receives it, too
    streams = [Connection(os.dup(number)) for number in range(3)]
    del sys.modules["__main__"].__file__  # which the forked process would run, too
    worker = server.forked(server._run_worker, sys.argv[-2:], dict(os.environ), streams)
    for number in range(2):
        os.close(number)
    worker.join()
    os._exit(worker.exitcode)
