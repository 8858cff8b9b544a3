"""The captions of one image, from a text of several lines, a list, or a shard's json."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from megabatch.data.pairs import clean_caption
from megabatch.evaluation.samples import Captions


def captions_in(data: bytes) -> Any:
    """The captions of a json member, one or several; None if it has none."""
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        return None
    if not isinstance(document, dict):
        return None
    return document.get("captions", document.get("caption"))


def _is_empty(caption: Any) -> bool:
    return caption is None or (isinstance(caption, str) and not caption.strip())


def some_are_empty(captions: Sequence[Any]) -> bool:
    """Whether some captions are empty, but not all: `clean_captions` then gives the others."""
    empty = [_is_empty(caption) for caption in captions]
    return any(empty) and not all(empty)


def clean_captions(value: Any, key: str) -> Captions:
    """The lines of a text, or the texts of a list, stripped, without the empty ones.

    Raises:
        BadSample: nothing is left, or an element is not a text.
    """
    if not isinstance(value, (list, tuple)):
        # Not str.splitlines: captions from the web have U+2028 and other separators within a line.
        value = re.split(r"[\r\n]+", clean_caption(value, key))
    kept = [clean_caption(v, key) for v in value if not _is_empty(v)]
    return kept or [clean_caption("", key)]
