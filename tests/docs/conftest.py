"""Pages show Accelerate, whose state the tests of the integrations clear."""

from tests.integrations.conftest import _new_accelerator

__all__ = ["_new_accelerator"]
