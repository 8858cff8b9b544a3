"""Runs of a second, as the trainer's tests have them."""

from tests.training.conftest import _one_thread, make_config, pictures

__all__ = ["_one_thread", "make_config", "pictures"]
