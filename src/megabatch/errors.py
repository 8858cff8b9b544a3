"""Errors that a command shows to its user."""


class UsageError(Exception):
    """A command cannot run as asked: printed as one line, exit code 2, before anything starts."""
