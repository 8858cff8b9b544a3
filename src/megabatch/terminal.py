"""The console on which commands print."""

from __future__ import annotations

import os
import sys
from typing import Any

from rich.console import Console


def plain_console(*, stderr: bool = False, quiet: bool = False) -> Console:
    """A console that prints text as it is, for standard output or `stderr`; `quiet`: nothing.

    By default rich takes `[red]` and `:cat:` in a path or caption for markup, and fails at `[/b]`;
    and it breaks long lines, but a path on two lines cannot be opened.
    """
    return _Console(
        stderr=stderr, quiet=quiet, soft_wrap=True, markup=False, emoji=False, highlight=False
    )


class _Console(Console):
    def print(self, *objects: Any, **options: Any) -> None:
        """As rich's; of whose releases the older ones do not call `on_broken_pipe`."""
        try:
            super().print(*objects, **options)
        except BrokenPipeError:
            self.on_broken_pipe()

    def on_broken_pipe(self) -> None:
        """Print nothing more if the reader is gone (`| head`), where rich would end the process.

        A run that is trained for hours must not end because the `tee` of its output did.
        """
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
