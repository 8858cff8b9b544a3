"""Runs of a second, as the trainer's tests have them."""

from tests.training.conftest import one_thread, make_config, pictures

__all__ = ["one_thread", "make_config", "pictures"]
