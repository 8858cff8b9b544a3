"""Which tests have threads, processes, clocks or memory in them, and so could fail by chance.

Checks of several processes (`on_processes`) are marked where they are defined; of the other tests
those that use one of these modules, themselves, in their fixtures or in functions that they call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

import pytest

MODULES = {
    "gc",
    "multiprocessing",
    "psutil",
    "resource",
    "signal",
    "socket",
    "threading",
    "time",
    "tracemalloc",
    "weakref",
}
#: Names of arguments and attributes that mean the same.
WORDS = {"extra_bytes", "max_memory", "workers"}
#: Starts a program and waits for its end: one with processes of its own is marked by its test.
WAITS = ("tests.programs", "run")


def is_concurrent(item: pytest.Function) -> bool:
    """Whether this test is to carry the marker `concurrency`."""
    made = item._fixtureinfo.name2fixturedefs.values()
    functions = [item.function, *(one.func for several in made for one in several)]
    return any(map(uses_concurrency, functions))


@functools.cache
def uses_concurrency(function: Callable[..., Any]) -> bool:
    """Whether a function or one of the tests' that it calls uses concurrency."""
    return any(map(_is_sign, _reached(function)))


def _reached(start: Any) -> Iterator[tuple[str, Any]]:
    """Every name that is used, and the module, function or class behind it, if any."""
    seen: set[Any] = set()
    new = [start]
    while new:
        value = new.pop()
        if not isinstance(value, (FunctionType, type)) or value in seen:
            continue
        seen.add(value)
        if isinstance(value, type):
            new += vars(value).values()
            continue
        new.append(getattr(value, "__wrapped__", None))
        names = set(_names(value.__code__))
        modules = [m for n in names if _is_ours(m := value.__globals__.get(n), ModuleType)]
        for name in names:
            for scope in (value.__globals__, *map(vars, modules)):
                found = scope.get(name)
                yield name, found
                if _is_ours(found, FunctionType, type) and _place(found) != WAITS:
                    new.append(found)


def _is_ours(value: Any, *kinds: type) -> bool:
    """Whether it is of the tests, and of one of these kinds."""
    name = value.__name__ if isinstance(value, ModuleType) else _place(value)[0]
    return isinstance(value, kinds) and name.startswith("tests.")


def _place(value: Any) -> tuple[str, str]:
    return str(getattr(value, "__module__", "")), str(getattr(value, "__qualname__", ""))


def _names(code: CodeType) -> Iterator[str]:
    """Names of globals, attributes, imports and keywords, in functions inside too."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
        elif isinstance(constant, tuple):  # keywords of calls are among them
            yield from (name for name in constant if isinstance(name, str))


def _is_sign(used: tuple[str, Any]) -> bool:
    name, found = used
    if isinstance(found, ModuleType):
        return found.__name__.partition(".")[0] in MODULES
    if found is not None:
        return _place(found)[0].partition(".")[0] in MODULES
    return name in MODULES | WORDS
