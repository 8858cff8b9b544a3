"""Numbers with their nouns, for messages."""

from __future__ import annotations


def are(number: int) -> str:
    """The verb after so many."""
    return "is" if number == 1 else "are"


def plural(number: int, noun: str) -> str:
    """A number and its noun: `1 pair`, `4,096 pairs`, `0 batches`."""
    ending = "" if number == 1 else "es" if noun.endswith("ch") else "s"
    return f"{number:,} {noun}{ending}"
