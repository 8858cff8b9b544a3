"""Settings that run code: `module:name`, the user's own losses and models, and `pipe:` commands.

Both count only if they come from the command line or from a Python call; from a file they are
refused unless the user trusts the file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megabatch.errors import UsageError, all_of
from megabatch.hints import is_reference

#: The beginning of a data source that is a command.
COMMAND = "pipe:"


def is_url(source: str) -> bool:
    """Whether a data source has the form of a URL, such as s3://bucket/a.tar."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]+://", source) is not None


def runs_code(settings: Mapping[str, Any]) -> list[str]:
    """The names of the settings that name code to run: of a model, a loss or data."""
    found = [name for name in ("model", "loss") if is_reference(settings.get(name))]
    return found + [n for n in ("train_data", "val_data") if COMMAND in str(settings.get(n))]


def refuse_references(settings: Mapping[str, Any], file: Path | str) -> None:
    """Raise a UsageError if settings that were read from a file name code to run."""
    reasons = [
        f"{file}: {name} = {settings[name]!r} would run code, for which only the command line may "
        "ask; --trust allows it if you trust this file"
        for name in runs_code(settings)
    ]
    if reasons:
        raise UsageError(all_of(reasons))
