"""Numbers with their nouns."""

import pytest

from megabatch.errors import plural


@pytest.mark.parametrize(
    ("number", "noun", "text"),
    [
        (1, "step", "1 step"),
        (0, "pair", "0 pairs"),
        (4096, "pair", "4,096 pairs"),
        (2, "micro-batch", "2 micro-batches"),
        (1, "distinct caption", "1 distinct caption"),
    ],
)
def test_a_number_has_its_noun(number: int, noun: str, text: str) -> None:
    assert plural(number, noun) == text
