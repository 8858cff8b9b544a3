"""The trainer: configuration, loop, checkpoints, logs. `megabatch train` is its command."""

from typing import TYPE_CHECKING

from megabatch.lazy import lazy

if TYPE_CHECKING:
    from megabatch.training.config import TrainConfig
    from megabatch.training.config_file import load_config, save_config
    from megabatch.training.session import train

__all__ = ["TrainConfig", "load_config", "save_config", "train"]

__getattr__ = lazy(
    __name__,
    {
        "TrainConfig": "megabatch.training.config",
        "load_config": "megabatch.training.config_file",
        "save_config": "megabatch.training.config_file",
        "train": "megabatch.training.session",
    },
)
