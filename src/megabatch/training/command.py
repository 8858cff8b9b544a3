"""`megabatch train`."""

from __future__ import annotations

import os

from megabatch.config.command_line import parse


def main(argv: list[str]) -> int:
    """Train as the options say; returns the exit code."""
    config, given = parse(argv)
    from megabatch.training.session import train  # imports torch, which --help does not need
    from megabatch.training.world import command_again

    again = argv if config.resume else [*argv, "--resume"]
    return train(config, resume_command=command_again(again, os.environ), given=given)
