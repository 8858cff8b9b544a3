"""WebDataset tar shards, read at random through an index of their headers."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from megabatch.data.pairs import BadSample, Pair, clean_caption, decode_image
from megabatch.data.tar_index import ABSENT, IMAGE_EXTENSIONS, KINDS, endings, tar_index
from megabatch.errors import UsageError

_OPEN_FILES = 64  # per process


class TarSamples:
    """The samples of tar files: adjacent members that share their name up to the first dot.

    A sample has at most one member of each of `megabatch.data.tar_index.KINDS`. The headers are
    read once, at construction; each member is then one read at a known offset. A damaged file is
    used up to the damage, which `damage` describes.

    Raises:
        UsageError: a file cannot be read or is compressed; no file has a sample.
    """

    def __init__(self, paths: Sequence[str | Path]) -> None:
        self.paths = [str(path) for path in paths]
        indices = [tar_index(path) for path in self.paths]
        # These tell an open file from one that has replaced it since.
        self._mtimes = [os.stat(path).st_mtime_ns for path in self.paths]
        self.damage = [i.damage for i in indices if i.damage]
        counts = [len(i.keys) for i in indices]
        if sum(counts) == 0:
            present = ", ".join(endings(self.paths[0])) or "no file"
            why = "; ".join(self.damage) or (
                f"no member ends in {', '.join(IMAGE_EXTENSIONS)} (there are {present})"
            )
            raise UsageError(f"no samples in {', '.join(self.paths[:3])}: {why}")
        # Arrays, not lists: they are small and stay shared between forked workers.
        self._shard = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
        self._spans = np.concatenate([i.spans for i in indices])
        self._keys = np.concatenate([i.keys for i in indices])

    def __len__(self) -> int:
        return len(self._keys)

    def key(self, index: int) -> str:
        """The sample's name in messages."""
        name = os.path.basename(self.paths[self._shard[index]])
        return f"{name}:{self._keys[index].decode(errors='replace')}"

    def has(self, index: int, kind: str) -> bool:
        """Whether the sample has a member of that kind."""
        return self._span(index, kind) != ABSENT

    def read(self, index: int, kind: str) -> bytes:
        """Return a member's bytes; BadSample if there is none or it cannot be read."""
        key, span = self.key(index), self._span(index, kind)
        if span == ABSENT:
            raise BadSample(f"no {kind}", key)
        number = self._shard[index]
        return _read(self.paths[number], self._mtimes[number], span, key)

    def image(self, index: int) -> Image.Image:
        """Return the sample's image; BadSample if it has none or it cannot be decoded."""
        return decode_image(self.read(index, "image"), self.key(index))

    def _span(self, index: int, kind: str) -> tuple[int, int]:
        offset, size = self._spans[index, KINDS.index(kind)]
        return int(offset), int(size)


class ShardPairs(TarSamples):
    """Pairs in tar files as img2dataset and webdataset write them.

    A sample's caption is its `txt`, or else "caption" in its `json`. If json has a "caption_id", a
    whole number from 0, it is the pair's id. A sample without an image or caption keeps its index
    and raises BadSample. Everything else is as in `TarSamples`.
    """

    def __getitem__(self, index: int) -> Pair:
        key = self.key(index)
        if not self.has(index, "image"):
            raise BadSample("no image", key)
        fields = _fields_of(self.read(index, "json")) if self.has(index, "json") else {}
        if self.has(index, "txt"):
            caption = _decode_text(self.read(index, "txt"), key)
        elif fields is None:
            raise BadSample("unreadable json", key)
        elif "caption" in fields:
            caption = fields["caption"]
        else:
            raise BadSample("no caption", key)
        caption = clean_caption(caption, key)
        return Pair(self.image(index), caption, key, _id_in(fields or {}, key))


class _OpenFile:
    """A file held open for reads at an offset."""

    def __init__(self, path: str) -> None:
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        if hasattr(self, "descriptor"):
            os.close(self.descriptor)


@functools.lru_cache(maxsize=_OPEN_FILES)
def _open_file(path: str, mtime: int) -> _OpenFile:
    return _OpenFile(path)


def _read(path: str, mtime: int, span: tuple[int, int], key: str) -> bytes:
    offset, size = span
    try:
        # A positioned read: processes that share a descriptor also share its file position.
        data = os.pread(_open_file(path, mtime).descriptor, size, offset)
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


def _fields_of(data: bytes) -> dict[str, Any] | None:
    """The fields of a json member; None if it cannot be read."""
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) else {}


def _id_in(fields: dict[str, Any], key: str) -> int | None:
    number = fields.get("caption_id")
    if number is None or (type(number) is int and 0 <= number < 2**62):
        return number
    raise BadSample("caption_id is not a whole number from 0 to 2**62 - 1", key)
