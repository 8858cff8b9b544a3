"""One process at a time writes a run's folder."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from megabatch.errors import UsageError

_NAME = "run.lock"


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the folder's lock, which the system lets go of when the process ends, however it does.

    The file `run.lock` stays behind and says who had it last. Where the file system knows no locks
    there is none.

    Raises:
        UsageError: another process has it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / _NAME).open("a+", encoding="utf-8") as file:
        try:
            # Of the process and not of the open file: one that is killed leaves no lock with the
            # readers that it started.
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            file.seek(0)
            holder = file.read().strip() or "another process"
            raise UsageError(f"--output {folder}: it is being written by {holder}") from None
        except OSError:
            yield
            return
        file.truncate(0)
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        file.write(f"process {os.getpid()} on {socket.gethostname()} since {since}\n")
        file.flush()
        yield
