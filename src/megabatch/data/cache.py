"""Cache files of arrays, which can be recomputed."""

from __future__ import annotations

import uuid
import warnings
import zipfile
import zlib
from pathlib import Path

import numpy as np

from megabatch.files import replacing


def read_arrays(path: Path, names: tuple[str, ...]) -> dict[str, np.ndarray] | None:
    """Return the named arrays of an .npz file; None if it is missing or cannot be read."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in names}
    except FileNotFoundError:
        return None
    except (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile, zlib.error) as error:
        warnings.warn(f"{path} is unreadable ({error}) and is created again", stacklevel=3)
        return None


def write_arrays(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """Write an .npz file, completely or not at all; only warn if it cannot be written.

    Several processes may write the same file at the same time.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        own = path.with_name(f"{path.stem}-{uuid.uuid4().hex}.partial")
        with replacing(path, own) as partial, partial.open("wb") as file:
            np.savez_compressed(file, **arrays)  # type: ignore[arg-type]  # no name is its flag
    except OSError as error:
        warnings.warn(f"not cached: {error}", stacklevel=3)
