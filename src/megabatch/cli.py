"""The `megabatch` program: the first word picks a command, which is imported only then."""

from __future__ import annotations

import importlib
import importlib.util
import sys

from megabatch.errors import UsageError

COMMANDS = {
    "train": ("megabatch.training.command", "train two towers on pairs"),
    "eval": ("megabatch.evaluation.command", "evaluate a run and write its report"),
    "data": ("megabatch.data.command", "write the built-in data sets as shards"),
    "bench": ("megabatch.benchmarking.command", "measure megabatch beside its peers"),
}

USAGE = "usage: megabatch COMMAND [OPTIONS]   (megabatch COMMAND --help lists the options)\n\n" + (
    "\n".join(f"  {name:<8}{summary}" for name, (_, summary) in COMMANDS.items())
)


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns its exit code (2: the command was asked for something impossible)."""
    words = sys.argv[1:] if argv is None else argv
    if not words or words[0] in ("-h", "--help"):
        print(USAGE)
        return 0 if words else 2
    if words[0] not in COMMANDS:
        expected = ", ".join(COMMANDS)
        print(f"megabatch: unknown command {words[0]!r}; expected one of {expected}", file=sys.stderr)
        return 2
    if importlib.util.find_spec("tyro") is None:
        print(
            "megabatch: the commands need the trainer's libraries: pip install 'megabatch[train]'",
            file=sys.stderr,
        )
        return 2
    module = importlib.import_module(COMMANDS[words[0]][0])
    try:
        return module.main(words[1:])
    except UsageError as error:
        print(f"megabatch {words[0]}: {error}", file=sys.stderr)
        return 2
