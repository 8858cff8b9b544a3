"""Options that several scripts have."""

from __future__ import annotations

import ast
from typing import Any


def setting(text: str) -> tuple[str, Any]:
    """`name=value`, the value a Python literal or else a string."""
    name, _, value = text.partition("=")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value
