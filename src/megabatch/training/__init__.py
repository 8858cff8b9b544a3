"""The trainer: loop, checkpoints, logs; the commands `megabatch train` and `megabatch plan`."""

from typing import TYPE_CHECKING

from megabatch.imports import lazy

if TYPE_CHECKING:
    from megabatch.config.file import load_config, save_config
    from megabatch.config.settings import TrainConfig
    from megabatch.training.run import train

__all__ = ["TrainConfig", "load_config", "save_config", "train"]

__getattr__ = lazy(__name__)
