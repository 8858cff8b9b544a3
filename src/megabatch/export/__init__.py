"""Trained models in the formats of other libraries, and on the hub; `megabatch export`."""

from typing import TYPE_CHECKING

from megabatch.imports import lazy

if TYPE_CHECKING:
    from megabatch.export.hub import push_to_hub
    from megabatch.export.run import export_run

__all__ = ["export_run", "push_to_hub"]

__getattr__ = lazy(__name__)
