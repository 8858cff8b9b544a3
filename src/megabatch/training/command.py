"""`megabatch train`."""

from __future__ import annotations

from megabatch.config.file import parse
from megabatch.config.settings import problems
from megabatch.errors import UsageError, all_of, checks_alone
from megabatch.training.run_folder import folder_problems


def main(argv: list[str]) -> int:
    """Train as the options say; returns the exit code."""
    config = parse(argv)
    if checks_alone():
        reasons = problems(config, "model", "train_data")
        if not config.resume:
            reasons += folder_problems(config)
        if reasons:
            raise UsageError(all_of(reasons))
    from megabatch.training.run import train  # imports torch, which --help does not need

    return train(config)
