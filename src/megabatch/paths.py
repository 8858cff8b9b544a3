"""Folders of the user."""

from __future__ import annotations

import os
from pathlib import Path


def default_cache_dir() -> Path:
    """Return `$MEGABATCH_CACHE`, else `$XDG_CACHE_HOME/megabatch`, else `~/.cache/megabatch`."""
    if chosen := os.environ.get("MEGABATCH_CACHE"):
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "megabatch"
