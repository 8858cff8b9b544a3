"""Files that are whole or absent, whenever the process dies."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a path to write to, which becomes `path` at the end, or vanishes on an error.

    A reader finds the old file or the new one, whole and on the disk. Its mode is the one that the
    umask leaves, whoever wrote it: safetensors' own files are for their user alone.

    Raises:
        OSError: it cannot be written.
    """
    partial = path.with_name(path.name + ".partial")
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
        partial.unlink(missing_ok=True)  # after success there is none


def write_text(path: Path, text: str) -> None:
    """Write a whole file in UTF-8.

    Raises:
        OSError: it cannot be written; the old file stays.
    """
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8")
