"""Numbers with their nouns, and names that were meant, for messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def are(number: int) -> str:
    """The verb after so many."""
    return "is" if number == 1 else "are"


def plural(number: int, noun: str) -> str:
    """A number and its noun: `1 pair`, `4,096 pairs`, `0 batches`."""
    ending = "" if number == 1 else "es" if noun.endswith("ch") else "s"
    return f"{number:,} {noun}{ending}"


def did_you_mean(word: str, known: Iterable[str], most: int = 1) -> str:
    """The end of a message about an unknown name: `; did you mean ViT-B-32?`, or nothing."""
    lower = {name.lower(): name for name in known}
    close = difflib.get_close_matches(word.lower(), lower, n=most)
    return f"; did you mean {' or '.join(lower[name] for name in close)}?" if close else ""
