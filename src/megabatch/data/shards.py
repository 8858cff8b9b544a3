"""WebDataset tar shards, read at random through an index of their headers."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megabatch.data.pairs import BadSample, Pair, clean_caption, decode_image
from megabatch.data.svg import SVG_SIZE
from megabatch.data.tar_index import ABSENT, IMAGE_EXTENSIONS, tar_index
from megabatch.errors import UsageError

_OPEN_FILES = 64  # per process


class ShardPairs:
    """Pairs in tar files as img2dataset and webdataset write them.

    Members of one sample stand together and share the name up to the first dot: `jpg`, `jpeg`,
    `png`, `webp` or `svg`, and `txt` or else `json` (its "caption"). Where json has a "caption_id",
    a whole number from 0, that is the pair's id. The headers are read once, here; then each sample
    is two or three reads at known offsets.

    A file that is damaged is used up to the damage, and `damage` says where that is. A sample
    without an image or caption keeps its index and raises BadSample. The longer side of an `svg` is
    drawn with `svg_size` pixels.

    Raises:
        UsageError: a file cannot be read or is compressed; no file holds a sample.
    """

    def __init__(self, paths: Sequence[str | Path], *, svg_size: int = SVG_SIZE) -> None:
        self.svg_size = svg_size
        self.paths = [str(path) for path in paths]
        indices = [tar_index(path) for path in self.paths]
        self.damage = [i.damage for i in indices if i.damage]
        counts = [len(i.keys) for i in indices]
        if sum(counts) == 0:
            why = "; ".join(self.damage) or f"no member ends in {', '.join(IMAGE_EXTENSIONS)}"
            raise UsageError(f"no samples in {', '.join(self.paths[:3])}: {why}")
        # Arrays, not objects: they stay shared between forked workers and are small.
        self._shard = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
        self._spans = np.concatenate([i.spans for i in indices])
        self._keys = np.concatenate([i.keys for i in indices])

    def __len__(self) -> int:
        return len(self._keys)

    def __getitem__(self, index: int) -> Pair:
        path = self.paths[self._shard[index]]
        key = f"{os.path.basename(path)}:{self._keys[index].decode(errors='replace')}"
        image, text, document = (tuple(int(v) for v in span) for span in self._spans[index])
        if image == ABSENT:
            raise BadSample("no image", key)
        facts = {} if document == ABSENT else _facts_of(_read(path, document, key))
        if text != ABSENT:
            caption = _decode_text(_read(path, text, key), key)
        elif facts is None:
            raise BadSample("unreadable json", key)
        elif "caption" in facts:
            caption = facts["caption"]
        else:
            raise BadSample("no caption", key)
        caption = clean_caption(caption, key)
        picture = decode_image(_read(path, image, key), key, svg_size=self.svg_size)
        return Pair(picture, caption, key, _id_in(facts or {}, key))


class _OpenFile:
    """A file held open for reads at an offset."""

    def __init__(self, path: str) -> None:
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        if hasattr(self, "descriptor"):
            os.close(self.descriptor)


@functools.lru_cache(maxsize=_OPEN_FILES)
def _open_file(path: str) -> _OpenFile:
    return _OpenFile(path)


def _read(path: str, span: tuple[int, ...], key: str) -> bytes:
    offset, size = span
    try:
        # A positioned read: processes that share a descriptor do not share a place in the file.
        data = os.pread(_open_file(path).descriptor, size, offset)
    except OSError as error:
        raise BadSample("unreadable shard", key) from error
    if len(data) != size:
        raise BadSample("unreadable shard", key)
    return data


def _decode_text(data: bytes, key: str) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadSample("caption is not UTF-8", key) from error


def _facts_of(data: bytes) -> dict[str, Any] | None:
    """What a json member says; None where it cannot be read."""
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) else {}


def _id_in(facts: dict[str, Any], key: str) -> int | None:
    number = facts.get("caption_id")
    if number is None or (type(number) is int and 0 <= number < 2**63):
        return number
    raise BadSample("caption_id is no whole number from 0", key)
