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

#: Settings that may be references.
SETTINGS = ("model", "loss")
#: Settings that may have commands among their sources, which `::` joins.
SOURCES = ("train_data", "val_data")
#: The beginning of a source that is a command.
COMMAND = "pipe:"


def is_url(source: str) -> bool:
    """Whether a data source has the form of a URL, such as s3://bucket/a.tar."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]+://", source) is not None


def absent(sources: str) -> list[str]:
    """The data sources that are plain paths, no patterns or URLs, and do not exist."""
    if Path(sources).exists():
        return []
    parts = (part for part in sources.split("::") if part not in ("", "glyphs"))
    paths = (
        p for p in parts if not (is_url(p) or p.startswith(COMMAND) or re.search(r"[*?\[{]", p))
    )
    return [path for path in paths if not Path(path).exists()]


def named(settings: Mapping[str, Any]) -> dict[str, str]:
    """The settings that name code to run, by name: of a model, a loss or data."""
    found = [name for name in SETTINGS if is_reference(settings.get(name))]
    for name in SOURCES:
        if any(source.startswith(COMMAND) for source in str(settings.get(name)).split("::")):
            found.append(name)
    return {name: settings[name] for name in found}


def refuse_references(settings: Mapping[str, Any], file: Path | str) -> None:
    """Raise a UsageError if settings that were read from a file name code to run."""
    reasons = [
        f"{file}: {name} = {value!r} would run "
        + ("a command" if name in SOURCES else f"code, the module {value.partition(':')[0]}")
        + ", for which only the command line may ask; --trust allows it if you trust this file"
        for name, value in named(settings).items()
    ]
    if reasons:
        raise UsageError(all_of(reasons))
