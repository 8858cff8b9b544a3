"""Two-tower models by name: open_clip's, Hugging Face's, and a small one of our own."""

from typing import TYPE_CHECKING

from megabatch.imports import lazy

if TYPE_CHECKING:
    from megabatch.models.names import available
    from megabatch.models.registry import create
    from megabatch.models.towers import ModelOptions, Towers, TwoTowers

__all__ = ["ModelOptions", "Towers", "TwoTowers", "available", "create"]

__getattr__ = lazy(__name__)
