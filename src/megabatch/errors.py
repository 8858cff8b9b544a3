"""Errors that a command shows to its user, and the words of their messages."""

from __future__ import annotations

import contextlib
import difflib
import os
import traceback
from collections.abc import Iterable, Iterator, Sequence


class UsageError(Exception):
    """A command cannot run as requested: printed as one line, exit code 2, before it starts."""

    exit_code = 2


class OutOfMemory(UsageError):
    """Memory ran out on this rank; the others do not know of it."""

    exit_code = 1  # not a mistake in the command


class CommunicationError(RuntimeError):
    """Another process of the group is gone, or did not make its call in time; names the
    operation."""


@contextlib.contextmanager
def naming(option: str) -> Iterator[None]:
    """Begin the message of a UsageError with the option, unless it begins with another one.

    An error for a library that is not installed stays as it is.
    """
    try:
        yield
    except UsageError as error:
        if isinstance(error, ImportError) or str(error).startswith("--"):
            raise
        raise UsageError(f"{option}: {error}") from error


@contextlib.contextmanager
def as_usage_error(label: str) -> Iterator[None]:
    """Turn an error of a library or of the user's code into a UsageError: one line with its place.

    label: how the line begins. A UsageError stays as it is.
    """
    try:
        yield
    except UsageError:
        raise
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        place = f"({frame.filename}, line {frame.lineno})"
        kind, reason = type(error).__name__, one_line(error, 400)
        raise UsageError(f"{label}: {kind}: {reason} {place}") from error


def checks_alone() -> bool:
    """Whether a command may check its options before anything else, in this process alone.

    If a launcher (torchrun, srun) started several, they check together, later: an error is then
    printed once.
    """
    return not {"WORLD_SIZE", "SLURM_STEP_NUM_TASKS"} & os.environ.keys()


def printable(name: str) -> str:
    """A file's name with escapes for bytes that are not UTF-8, which no file could hold."""
    return name.encode(errors="backslashreplace").decode()


def one_line(error: BaseException, limit: int | None = None) -> str:
    """An error's message on one line, cut off at `limit` characters; its type if there is none."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if limit is None or len(text) <= limit else text[: limit - 3] + "..."


def all_of(reasons: Sequence[str]) -> str:
    """One message with several reasons, each on its own line."""
    return reasons[0] if len(reasons) == 1 else "\n  - ".join(["several things:", *reasons])


def plural(number: int, noun: str) -> str:
    """A number and its noun: `1 pair`, `4,096 pairs`, `0 batches`."""
    ending = "" if number == 1 else "es" if noun.endswith("ch") else "s"
    return f"{number:,} {noun}{ending}"


def did_you_mean(word: str, known: Iterable[str], most: int = 1) -> str:
    """The end of a message about an unknown name: `; did you mean ViT-B-32?`, or nothing."""
    lower = {name.lower(): name for name in known}
    close = difflib.get_close_matches(word.lower(), lower, n=most)
    return f"; did you mean {' or '.join(lower[name] for name in close)}?" if close else ""
