"""Errors that a command shows to its user."""

from __future__ import annotations

from collections.abc import Sequence


class UsageError(Exception):
    """A command cannot run as requested: printed as one line, exit code 2, before it starts."""


class CommunicationError(RuntimeError):
    """Another process of the group is gone or did not come in time; names the operation."""


def one_line(error: BaseException, limit: int | None = None) -> str:
    """An error's message on one line, cut off at `limit` characters; its type if there is none."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if limit is None or len(text) <= limit else text[: limit - 3] + "..."


def all_of(reasons: Sequence[str]) -> str:
    """One message with several reasons, each on its own line."""
    return reasons[0] if len(reasons) == 1 else "\n  - ".join(["several things:", *reasons])
