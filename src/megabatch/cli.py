"""The `megabatch` program: imports the module of the command that the first word names."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import sys

from megabatch import __version__
from megabatch.errors import UsageError, did_you_mean, printable
from megabatch.imports import named_extras

COMMANDS = {
    "train": ("megabatch.training.command", "train two towers on pairs"),
    "eval": ("megabatch.evaluation.command", "evaluate a run or any open_clip model"),
    "report": (
        "megabatch.evaluation.report.command",
        "write the report of a run, or compare several",
    ),
    "export": ("megabatch.export.command", "write a run's model for OpenCLIP and other libraries"),
    "data": ("megabatch.data.command", "write the glyphs as shards, inspect a data set"),
    "models": ("megabatch.models.names", "list the models that can be trained"),
    "plan": ("megabatch.training.plan_command", "estimate the memory that a run needs"),
    "bench": ("megabatch.benchmarking.bench", "compare megabatch with its peers"),
}

USAGE = "usage: megabatch COMMAND [OPTIONS]   (megabatch COMMAND --help lists the options)\n\n" + (
    "\n".join(f"  {name:<8}{summary}" for name, (_, summary) in COMMANDS.items())
    + "\n\n  --version  the versions of megabatch, torch, Triton and CUDA"
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
    for word in words:
        if (shown := printable(word)) != word:
            return _complain(f"'{shown}': expected text in UTF-8")
    if isinstance(sys.stdout, io.TextIOWrapper):  # what a terminal lacks: escapes, as on stderr
        sys.stdout.reconfigure(errors="backslashreplace")
    command, options = words[0], words[1:]
    if command not in COMMANDS:
        hint = did_you_mean(command, COMMANDS) or f"; expected one of {', '.join(COMMANDS)}"
        return _complain(f"unknown command {command!r}{hint}")
    try:
        with named_extras("bench" if command == "bench" else "train"):
            return int(importlib.import_module(COMMANDS[command][0]).main(options))
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

    kernels = "no Triton"
    with contextlib.suppress(ImportError):  # it exists for Linux only
        import triton

        kernels = f"Triton {triton.__version__}"
    cuda = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
    return f"megabatch {__version__} (torch {torch.__version__}, {kernels}, {cuda})"


def _complain(message: str, command: str = "", code: int = 2) -> int:
    print(f"megabatch {command}".rstrip() + f": {message}", file=sys.stderr)
    return code
