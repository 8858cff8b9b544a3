"""The user's own losses and models, `module:name`: imported, and called with what they take."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Collection
from typing import Any

from megabatch.errors import UsageError, as_usage_error, did_you_mean
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
    with as_usage_error(f"{label}: importing {module_name}, installed or in {folder}"):
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
    with as_usage_error(label):
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
