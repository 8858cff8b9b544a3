"""The trainer: loop, checkpoints, logs; the commands `megabatch train` and `megabatch plan`."""

from typing import TYPE_CHECKING

from megabatch.lazy import lazy

if TYPE_CHECKING:
    from megabatch.config.file import load_config, save_config
    from megabatch.config.settings import TrainConfig
    from megabatch.training.session import train

__all__ = ["TrainConfig", "load_config", "save_config", "train"]

__getattr__ = lazy(
    __name__,
    {
        "TrainConfig": "megabatch.config.settings",
        "load_config": "megabatch.config.file",
        "save_config": "megabatch.config.file",
        "train": "megabatch.training.session",
    },
)
