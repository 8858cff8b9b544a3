"""The `megabatch` program: imports the module of the command that its first words name."""

from __future__ import annotations

import os
import pkgutil
import sys

from megabatch import __version__
from megabatch.errors import UsageError, did_you_mean
from megabatch.imports import named_extras

#: The function of each command, and a summary.
COMMANDS = {
    "train": ("megabatch.training.command:main", "train two towers on pairs"),
    "eval": ("megabatch.evaluation.command:main", "evaluate a run or any open_clip model"),
    "report": (
        "megabatch.evaluation.report.command:main",
        "write a run's report, or compare runs",
    ),
    "export": ("megabatch.export.command:main", "write a run's model for other libraries"),
    "data glyphs": ("megabatch.data.command:glyphs", "write the built-in glyphs as shards"),
    "data inspect": ("megabatch.data.command:inspect", "read samples of a data set"),
    "models": ("megabatch.models.names:main", "list the models that can be trained"),
    "plan": ("megabatch.training.plan_command:main", "estimate memory and time of a step"),
    "bench loss": ("megabatch.benchmarking.bench:main", "compare megabatch with its peers"),
}

USAGE = "usage: megabatch COMMAND [OPTIONS]   (megabatch COMMAND --help lists the options)\n\n" + (
    "\n".join(f"  {name:<14}{summary}" for name, (_, summary) in COMMANDS.items())
    + "\n\n  --version  the versions of megabatch, torch and CUDA"
)


def main(argv: list[str] | None = None) -> int:
    """Run one command.

    Returns:
        The exit code: 0; 2 for an invalid command line; 1 if the command had to stop; 75 after
        SIGTERM or SIGUSR1 with a checkpoint; 130 after Ctrl-C.
    """
    words = sys.argv[1:] if argv is None else argv
    if not words or words[0] in ("-h", "--help"):
        print(USAGE)
        return 0 if words else 2
    if words[0] in ("-V", "--version"):
        print(_versions())
        return 0
    first, two = words[0], " ".join(words[:2])
    command = two if two in COMMANDS else first
    if command not in COMMANDS:
        hint = did_you_mean(two, COMMANDS) or did_you_mean(first, COMMANDS)
        expected = f"; expected {', '.join(COMMANDS)}"
        return _complain(f"unknown command {first!r}{hint or expected}")
    try:
        with named_extras("bench" if first == "bench" else "train"):
            run = pkgutil.resolve_name(COMMANDS[command][0])
            return int(run(words[len(command.split()) :]))
    except UsageError as error:
        return _complain(str(error), command, error.exit_code)
    except SystemExit as leaving:  # from the parser, after --help or an error that it printed
        return leaving.code if isinstance(leaving.code, int) else 2
    except KeyboardInterrupt:
        return _complain("interrupted", command, 130)
    except BrokenPipeError:  # `megabatch ... | head`; Python flushes the rest when it exits
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _versions() -> str:
    import torch

    cuda = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
    return f"megabatch {__version__} (torch {torch.__version__}, {cuda})"


def _complain(message: str, command: str = "", code: int = 2) -> int:
    print(f"megabatch {command}".rstrip() + f": {message}", file=sys.stderr)
    return code
