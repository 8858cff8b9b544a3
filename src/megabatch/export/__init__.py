"""Trained models in the formats of other libraries: `export_run`, and `megabatch export`."""

from typing import TYPE_CHECKING

from megabatch.imports import lazy

if TYPE_CHECKING:
    from megabatch.export.run import export_run

__all__ = ["export_run"]

__getattr__ = lazy(__name__)
