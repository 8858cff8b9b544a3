"""The folder of a run: checks that it can be used, and a lock against a second process."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import time
from collections.abc import Iterator
from typing import Any

from megabatch import files
from megabatch.config.file import load_config, to_dict
from megabatch.config.settings import MAY_CHANGE, TrainConfig
from megabatch.errors import UsageError, all_of
from megabatch.options import option


@contextlib.contextmanager
def own_folder(config: TrainConfig) -> Iterator[None]:
    """Hold the lock of the run's folder, which the system releases when the process ends.

    The file `run.lock` remains and names its last holder. A file system without locks gets none.

    Raises:
        UsageError: another process has the lock, or the folder cannot be used for this run.
    """
    folder = config.output
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "run.lock").open("a+", encoding="utf-8") as file:
        try:
            # A lock of the process, not of the open file: data workers that outlive a killed
            # process do not keep it.
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            file.truncate(0)
            since = time.strftime("%Y-%m-%d %H:%M:%S")
            file.write(f"process {os.getpid()} on {socket.gethostname()} since {since}\n")
            file.flush()
        except (BlockingIOError, PermissionError):
            file.seek(0)
            holder = file.read().strip() or "another process"
            raise UsageError(f"--output: {folder} is being written by {holder}") from None
        except OSError:
            pass
        if reasons := folder_problems(config):  # again: it may have been used before the lock
            raise UsageError(all_of(reasons))
        yield


def folder_problems(config: TrainConfig) -> list[str]:
    """Reasons why the output folder cannot be used: not writable, another run's, not a run's."""
    folder = config.output
    if problem := files.folder_problem(folder):
        return [f"--output {folder}: {problem}"]
    begun = [f for f in ("config.toml", "checkpoints", "metrics.jsonl") if (folder / f).exists()]
    if begun and not config.resume:
        return [
            f"--output {folder}: holds a run already; continue it with --resume, or choose another"
        ]
    if begun and "config.toml" not in begun:
        return [f"--resume: {folder} has {begun[0]} but no config.toml"]
    return _differences(config) if begun else []


def _differences(config: TrainConfig) -> list[str]:
    # Trusted, as the values are compared only.
    own = load_config(config.output / "config.toml", trust=True)
    now, before = to_dict(config), to_dict(own)
    declared: Any = TrainConfig
    changed = [
        f"{option(key)} was {_shown(before[key])}, is {_shown(now[key])}"
        for key in now
        if now[key] != before[key] and MAY_CHANGE not in declared.__pydantic_fields__[key].metadata
    ]
    if not changed:
        return []
    return [f"--resume: {config.output} is a run with other settings: {', '.join(changed)}"]


def _shown(value: object) -> str:
    return "not set" if value is None else str(value)
