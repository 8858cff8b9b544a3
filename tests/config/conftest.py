"""Runs of a second, as the trainer's tests have them."""

from tests.training.conftest import make_config, one_thread, pictures

__all__ = ["make_config", "one_thread", "pictures"]
