"""Trained models in the formats of other libraries: `export_run`, and `megabatch export`."""

from typing import TYPE_CHECKING

from megabatch.lazy import lazy

if TYPE_CHECKING:
    from megabatch.export.run import export_run

__all__ = ["export_run"]

__getattr__ = lazy(__name__, {"export_run": "megabatch.export.run"})
