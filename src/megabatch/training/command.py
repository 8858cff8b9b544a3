"""`megabatch train`."""

from __future__ import annotations

import os

from megabatch.config.command_line import check, parse
from megabatch.config.resolve import name_defaults
from megabatch.errors import UsageError, all_of, checks_alone
from megabatch.training.run_folder import folder_problems


def main(argv: list[str]) -> int:
    """Train as the options say; returns the exit code."""
    config, given = parse(argv)
    if checks_alone():
        check(config, given)
        if not config.resume and (reasons := folder_problems(config)):
            raise UsageError(name_defaults(all_of(reasons), given))
    from megabatch.training.run import train  # imports torch, which --help does not need
    from megabatch.training.world import command_again

    again = argv if config.resume else [*argv, "--resume"]
    return train(config, resume_command=command_again(again, os.environ), given=given)
