"""Errors that a command shows to its user."""

from __future__ import annotations

from collections.abc import Sequence


class UsageError(Exception):
    """A command cannot run as requested: printed as one line, exit code 2, before it starts."""


class CommunicationError(RuntimeError):
    """Another process of the group is gone or did not come in time; names the operation."""


def all_of(reasons: Sequence[str]) -> str:
    """One message with several reasons, each on its own line."""
    return reasons[0] if len(reasons) == 1 else "\n  - ".join(["several things:", *reasons])
