"""Files of arrays that can be made again."""

from __future__ import annotations

import os
import tempfile
import warnings
import zipfile
import zlib
from pathlib import Path

import numpy as np

from megabatch.paths import default_cache_dir

__all__ = ["default_cache_dir", "read_arrays", "write_arrays"]


def read_arrays(path: Path, names: tuple[str, ...]) -> dict[str, np.ndarray] | None:
    """Return the named arrays of an .npz file; None if it is not there or cannot be read."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in names}
    except FileNotFoundError:
        return None
    except (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile, zlib.error) as error:
        warnings.warn(f"{path} is unreadable ({error}) and made again", stacklevel=3)
        return None


def write_arrays(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """Write an .npz file whole or not at all; where it cannot be written, warn and go on."""
    partial = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Written beside and renamed: another process sees the whole file or none.
        handle, partial = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".partial")
        with os.fdopen(handle, "wb") as file:
            np.savez_compressed(file, **arrays)  # type: ignore[arg-type]  # no name is its flag
        os.replace(partial, path)
        partial = None
    except OSError as error:
        warnings.warn(f"not cached: {error}", stacklevel=3)
    finally:
        if partial is not None:
            Path(partial).unlink(missing_ok=True)
