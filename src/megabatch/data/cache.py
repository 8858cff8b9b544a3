"""Cache files of arrays, which can be recomputed."""

from __future__ import annotations

import uuid
import warnings
import zipfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from megabatch.files import replacing


def cached_arrays(
    path: Path, names: tuple[str, ...], make: Callable[[], Mapping[str, Any]]
) -> dict[str, np.ndarray]:
    """Return the named arrays of an .npz file; make and write them if it is missing or unreadable.

    The file is written completely or not at all, with a warning if it cannot be. Several processes
    may write it at the same time.
    """
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in names}
    except FileNotFoundError:
        pass
    except (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile, zlib.error) as error:
        warnings.warn(f"{path} is unreadable ({error}) and is created again", stacklevel=3)
    values = make()
    made = {name: np.asarray(values[name]) for name in names}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        own = path.with_name(f"{path.stem}-{uuid.uuid4().hex}.partial")
        with replacing(path, own) as partial, partial.open("wb") as file:
            np.savez_compressed(file, **made)  # type: ignore[arg-type]  # no name is its flag
    except OSError as error:
        warnings.warn(f"not cached: {error}", stacklevel=3)
    return made
