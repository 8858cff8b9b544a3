"""Imports that wait until they are needed, and the extra to install if a library is missing."""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib.util
import pkgutil
import sys
from collections.abc import Callable, Iterator
from typing import Any

from megabatch.errors import UsageError

#: Libraries whose distribution has another name than their module.
DISTRIBUTIONS = {
    "PIL": "pillow",
    "mlflow": "mlflow-skinny",
    "open_clip": "open_clip_torch",
    "sklearn": "scikit-learn",
}
#: Modules of the extra `hf`, which commands need for some models only.
HF = ("tokenizers", "transformers")


class MissingLibrary(UsageError, ImportError):
    """A library that the call needs is not installed."""


@contextlib.contextmanager
def named_extras(extra: str = "train") -> Iterator[None]:
    """Name the extra to install if an import inside fails.

    Args:
        extra: the running command's, preferred, and assumed for dependencies of its libraries.

    Raises:
        MissingLibrary: instead of a ModuleNotFoundError, except for megabatch's own modules.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        module = (error.name or "").partition(".")[0]
        if module in ("", "megabatch"):
            raise
        raise MissingLibrary(missing(module, extra)) from error


def missing(module: str, extra: str = "train") -> str:
    """One sentence: the missing library and the command that installs it, by the extra given."""
    extra = "hf" if module in HF else extra
    library = DISTRIBUTIONS.get(module, module)
    return f"{library} is not installed, which this needs: pip install 'megabatch[{extra}]'"


def lazy(package: str) -> Callable[[str], Any]:
    """A package's `__getattr__` (PEP 562), which imports submodules and public names when used.

    So `megabatch train --help` does not import torch, and a package is usable without the libraries
    that only some of its names need; using the others raises MissingLibrary. The package's `if
    TYPE_CHECKING:` block, read from its source, has the names and their modules.
    """

    @functools.cache
    def places() -> dict[str, str | None]:
        nodes = ast.walk(ast.parse(pkgutil.get_data(package, "__init__.py") or b""))
        found = [node for node in nodes if isinstance(node, ast.ImportFrom)]
        return {alias.name: node.module for node in found for alias in node.names}

    def get(name: str) -> Any:
        with named_extras():
            if importlib.util.find_spec(f"{package}.{name}"):
                return importlib.import_module(f"{package}.{name}")  # sets the attribute
            if place := places().get(name):
                value = getattr(importlib.import_module(place), name)
                setattr(sys.modules[package], name, value)
                return value
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return get
