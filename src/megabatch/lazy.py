"""Packages whose names are imported when they are first asked for.

So `megabatch train --help` does not wait for torch, and a package says what it offers without
needing every library that some of it needs.
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
        places: for each name that the package offers, the module that defines it; a submodule is
            its own place.

    What it returns raises MissingLibrary, an ImportError, for a name whose module needs a library
    that is not installed.
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
