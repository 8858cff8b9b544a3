"""The trainer: configuration, loop, checkpoints, logs. `megabatch train` is its command."""

from megabatch.training.config import TrainConfig
from megabatch.training.config_file import load_config, save_config
from megabatch.training.session import train

__all__ = ["TrainConfig", "load_config", "save_config", "train"]
