"""`megabatch train`."""

from __future__ import annotations

import argparse
import shlex

import tyro

from megabatch.training.config import TrainConfig
from megabatch.training.config_file import load_config, packaged
from megabatch.training.session import train

_DESCRIPTION = """Train two towers on pairs with one contrastive loss over the whole global batch.

--config NAME|FILE starts from a TOML file, a packaged one ({names}) or your own, such as a run's
config.toml; the options below override it."""


def main(argv: list[str]) -> int:
    """Train as the options say; returns the exit code."""
    config = parse(argv)
    again = argv if config.resume else [*argv, "--resume"]
    return train(config, resume_command=shlex.join(["megabatch", "train", *again]))


def parse(argv: list[str]) -> TrainConfig:
    """Turn options into a configuration: defaults, then `--config`'s file, then the others.

    Raises:
        UsageError: the file cannot be used.
        SystemExit: `--help` (0), or an option that does not exist or has a value of the wrong type
            (2, after a message).
    """
    outer = argparse.ArgumentParser(prog="megabatch train", add_help=False, allow_abbrev=False)
    outer.add_argument("--config", metavar="NAME|FILE")
    chosen, options = outer.parse_known_args(argv)
    default = TrainConfig() if chosen.config is None else load_config(chosen.config)
    description = _DESCRIPTION.format(names=", ".join(packaged()))
    return tyro.cli(
        TrainConfig,
        args=options,
        default=default,
        prog="megabatch train",
        description=description,
    )
