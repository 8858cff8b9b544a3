"""Packages that import their public names on first access.

So `megabatch train --help` does not import torch, and a package is usable without the libraries
that only some of its names need.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

from megabatch.extras import named_extras


def lazy(package: str, places: Mapping[str, str]) -> Callable[[str], Any]:
    """A package's `__getattr__` (PEP 562).

    Args:
        package: `__name__` of the package.
        places: for each public name, the module that defines it; for a submodule, itself.

    Returns:
        A function that raises MissingLibrary, an ImportError, if the module of a name needs a
        library that is not installed.
    """

    def get(name: str) -> Any:
        if name not in places:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        place = places[name]
        with named_extras():
            module = importlib.import_module(place)
        value = module if place == f"{package}.{name}" else getattr(module, name)
        setattr(sys.modules[package], name, value)
        return value

    return get
