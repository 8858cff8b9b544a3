"""Settings that run code: `module:name`, the user's own losses and models, and `pipe:` commands.

Loading a reference imports its module, and a data source `pipe:...` is a command of the shell. So
both count only if they come from the command line or from a Python call; from a file they are
refused unless the user trusts the file.
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
import sys
import traceback
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from megabatch.errors import UsageError, all_of, did_you_mean, one_line
from megabatch.hints import is_reference, option

#: Settings that may be references.
SETTINGS = ("model", "loss")
#: Settings that may have commands among their sources, which `::` joins.
SOURCES = ("train_data", "val_data")
#: The beginning of a source that is a command.
COMMAND = "pipe:"


def is_url(source: str) -> bool:
    """Whether a data source has the form of a URL, such as s3://bucket/a.tar."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]+://", source) is not None


def absent(sources: str) -> list[str]:
    """The data sources that are plain paths, no patterns or URLs, and do not exist."""
    if Path(sources).exists():
        return []
    parts = (part for part in sources.split("::") if part not in ("", "glyphs"))
    paths = (
        p for p in parts if not (is_url(p) or p.startswith(COMMAND) or re.search(r"[*?\[{]", p))
    )
    return [path for path in paths if not Path(path).exists()]


def named(settings: Mapping[str, Any]) -> dict[str, str]:
    """The settings that name code to run, by name: of a model, a loss or data."""
    found = [name for name in SETTINGS if is_reference(settings.get(name))]
    for name in SOURCES:
        if any(source.startswith(COMMAND) for source in str(settings.get(name)).split("::")):
            found.append(name)
    return {name: settings[name] for name in found}


def refuse_references(settings: Mapping[str, Any], file: Path | str) -> None:
    """Raise a UsageError if settings that were read from a file name code to run."""
    reasons = [
        f"{file}: {name} = {value!r} would run "
        + ("a command" if name in SOURCES else f"code, the module {value.partition(':')[0]}")
        + ", for which only the command line may ask; --trust allows it if you trust this file"
        for name, value in named(settings).items()
    ]
    if reasons:
        raise UsageError(all_of(reasons))


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
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        place = f"{label}: importing {module_name}, installed or in {folder}"
        raise failure(place, error) from error
    found = getattr(module, name, None)
    if not callable(found):
        place = getattr(module, "__file__", None) or "a namespace package"
        raise UsageError(
            f"{label}: expected {name} to be a class or a function of {place}, got "
            + ("no such name" if found is None else describe(found))
            + did_you_mean(name, set(vars(module)) - {name})
        )
    return found


def call(found: Any, label: str, **arguments: Any) -> Any:
    """Call a loaded class or function with the arguments that its signature has.

    Raises:
        UsageError: it needs others, or it fails.
    """
    known = accepted(found, arguments, label)
    try:
        return found(**{name: arguments[name] for name in known})
    except UsageError:
        raise
    except Exception as error:
        raise failure(label, error) from error


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


def describe(value: object) -> str:
    """A value's type, with the value if that is short."""
    text = repr(value)
    return f"{text} ({type(value).__name__})" if len(text) < 40 else type(value).__name__


def failure(label: str, error: Exception) -> UsageError:
    """The error of the user's code, on one line with its place."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    return UsageError(f"{label}: {type(error).__name__}: {one_line(error, 400)}{place}")
