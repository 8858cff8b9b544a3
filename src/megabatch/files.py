"""Atomic writes: files and folders that are complete or absent, whenever the process dies."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from megabatch.errors import UsageError

try:
    import fcntl
except ImportError:  # Windows, where files are not locked
    fcntl = None  # type: ignore[assignment]


@contextlib.contextmanager
def replacing(path: Path, partial: Path | None = None) -> Iterator[Path]:
    """Yield a path to write to, which is renamed to `path` at the end, or removed on an error.

    A reader finds the old file or the new one, complete and on the disk. Its mode is the one that
    the umask leaves, whoever wrote it: safetensors creates files for their owner alone.

    Args:
        path: the file to write.
        partial: the path to yield, in the same folder. By default it has a fixed name, so that the
            next write removes what a killed process left. Processes that may write the same file
            at the same time need one each.

    Raises:
        OSError: the file cannot be written.
    """
    partial = partial or path.with_name(path.name + ".partial")
    try:
        partial.unlink(missing_ok=True)
        partial.touch()
        mode = stat.S_IMODE(partial.stat().st_mode)
        yield partial
        partial.chmod(mode)
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)  # gone after success


def write_text(path: Path, text: str) -> None:
    """Write a file in UTF-8, completely or not at all.

    Raises:
        OSError: the file cannot be written; the old one stays.
    """
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def new_folder(output: Path) -> Iterator[Path]:
    """Yield a folder to write to, which is renamed to `output` at the end, or removed on an error.

    Raises:
        UsageError: `output` exists and is not an empty folder, or cannot be written.
    """
    if output.exists() and not (output.is_dir() and not any(output.iterdir())):
        raise UsageError(f"{output} exists and is not an empty folder; choose another --output")
    partial = output.parent / f".{output.name}.partial-{secrets.token_hex(4)}"
    try:
        partial.mkdir(parents=True)
        yield partial
        os.replace(partial, output)
    except OSError as error:
        raise UsageError(f"cannot write {output}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def lock(file: IO[Any], *, wait: bool) -> None:
    """Lock a file that is open for writing against other processes, for as long as it is open.

    Windows, and a file system that has no locks, lock nothing.

    Raises:
        BlockingIOError: another process has it, without `wait`.
    """
    if fcntl is None:
        return
    try:
        # Not flock, whose locks the processes of a data loader would inherit.
        fcntl.lockf(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError) as error:
        raise BlockingIOError(*error.args) from error
    except OSError:
        pass


def folder_problem(folder: Path) -> str:
    """The reason why files cannot be written to a folder, which may not exist yet; "" if none."""
    existing = folder
    try:
        existing = next(p for p in (folder, *folder.absolute().parents) if p.exists())
        if not existing.is_dir():
            return f"{existing} is not a folder"
        # Permissions are not enough: root may do anything, and a disk may be read-only.
        with tempfile.TemporaryFile(dir=existing):
            return ""
    except OSError as error:
        return f"{existing} cannot be written to: {error.strerror or error}"


def default_cache_dir() -> Path:
    """Return `$MEGABATCH_CACHE`, else `$XDG_CACHE_HOME/megabatch`, else `~/.cache/megabatch`."""
    if chosen := os.environ.get("MEGABATCH_CACHE"):
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "megabatch"
