"""Two-tower models by name: open_clip's, and a small pair of our own for the glyphs."""

from megabatch.models.registry import available, create
from megabatch.models.towers import Towers

__all__ = ["Towers", "available", "create"]
