"""Folders that `save_to_disk` of Hugging Face's datasets writes.

Read without that library, which would bring pandas and a dozen more packages along for what is two
small JSON files beside Arrow streams.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megabatch.errors import UsageError

_STATE = "state.json"  # of one data set
_SPLITS = "dataset_dict.json"  # of several, each in a folder of its own


def is_saved(folder: Path) -> bool:
    """Whether `save_to_disk` of Hugging Face's datasets wrote this folder."""
    return (folder / _STATE).is_file() or (folder / _SPLITS).is_file()


def saved_files(folder: Path) -> list[Path]:
    """The Arrow files of a folder that `save_to_disk` wrote; of several splits, those of train.

    Raises:
        UsageError: a file is missing or unreadable; there are splits, but no train.
    """
    if not (folder / _STATE).is_file():
        splits = _read(folder / _SPLITS, "splits")
        if "train" not in splits:
            others = ", ".join(map(repr, splits)) or "none"
            raise UsageError(
                f"{folder} has no split 'train', but {others}: give the folder of the one that is "
                "meant"
            )
        return saved_files(folder / "train")
    state = folder / _STATE
    try:
        files = [folder / entry["filename"] for entry in _read(state, "_data_files")]
    except (KeyError, TypeError) as error:
        raise UsageError(f"{state} does not name its files as datasets does") from error
    if _read(state, "_indices_data_files", None):
        raise UsageError(
            f"{folder} was saved by an old version of datasets, with its rows selected by a second "
            "file; load and save it once more with datasets 2 or newer"
        )
    if missing := [path for path in files if not path.is_file()]:
        raise UsageError(f"{missing[0]} is missing, which {state} names")
    if not files:
        raise UsageError(f"no rows in {folder}")
    return files


def _read(path: Path, *key_and_default: Any) -> Any:
    """One entry of a JSON file that holds an object."""
    key, *default = key_and_default
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read {path}: {' '.join(str(error).split())}") from error
    if not isinstance(document, dict) or (not default and not isinstance(document.get(key), list)):
        raise UsageError(f"{path} is not what datasets writes: expected a list {key!r} in it")
    return document.get(key)
