"""The user's own losses and models, `module:name`: imported, and called with what they take."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Collection, Iterator
from typing import Any

from megabatch.errors import UsageError, did_you_mean, one_line
from megabatch.options import option


def load(reference: str, setting: str) -> Any:
    """Import the callable that a reference names.

    Modules are also found in the working directory, as with `python -m`. It stays on `sys.path`,
    where worker processes look too.

    Args:
        reference: `module:name`.
        setting: the setting that has it, for messages.

    Raises:
        UsageError: there is no such module or name, importing it fails, or it is not callable.
    """
    label = f"{option(setting)} {reference}"
    module_name, _, name = reference.partition(":")
    folder = os.getcwd()
    if folder not in sys.path and "" not in sys.path:
        sys.path.insert(0, folder)
    importlib.invalidate_caches()
    with _failures(f"{label}: importing {module_name}, installed or in {folder}"):
        module = importlib.import_module(module_name)
    found = getattr(module, name, None)
    if not callable(found):
        hint = did_you_mean(name, [known for known in vars(module) if known != name])
        raise UsageError(f"{label}: {module_name} has no class or function {name}{hint}")
    return found


def call(found: Any, label: str, **arguments: Any) -> Any:
    """Call a loaded class or function with the arguments that its signature has.

    Raises:
        UsageError: it needs others, or it fails.
    """
    known = accepted(found, arguments, label)
    with _failures(label):
        return found(**{name: arguments[name] for name in known})


def accepted(found: Any, names: Collection[str], label: str, *, positional: int = 0) -> set[str]:
    """The names that a callable has as parameters, after `positional` first ones.

    Raises:
        UsageError: it needs a parameter of another name.
    """
    try:
        parameters = list(inspect.signature(found).parameters.values())
    except (TypeError, ValueError):  # written in C
        parameters = []
    variadic = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    rest = [p for p in parameters if p.kind not in variadic][positional:]
    unknown = [p.name for p in rest if p.default is p.empty and p.name not in names]
    if unknown:
        raise UsageError(
            f"{label}: it needs {', '.join(unknown)}; expected parameters with a default, or "
            f"{' or '.join(names)}"
        )
    return {p.name for p in rest} & set(names)


@contextlib.contextmanager
def _failures(label: str) -> Iterator[None]:
    """Turn an error of the user's code into a UsageError: one line, with its place."""
    try:
        yield
    except UsageError:
        raise
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        place = f"({frame.filename}, line {frame.lineno})"
        reason = one_line(error, 400)
        raise UsageError(f"{label}: {type(error).__name__}: {reason} {place}") from error
