"""Errors that a command shows to its user."""


class UsageError(Exception):
    """A command cannot run as asked: printed as one line, exit code 2, before anything starts."""


class CommunicationError(RuntimeError):
    """Another process of the group is gone, or did not come in time; names the operation."""
