"""WebDataset tar shards, read at random through an index of their headers."""

from __future__ import annotations

import functools
import json
import os
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from webdataset.tariterators import base_plus_ext

from megabatch.data.pairs import BadSample, Pair, clean_caption, decode_image
from megabatch.errors import UsageError

IMAGE_EXTENSIONS = ("jpg", "jpeg", "png", "webp")

_OPEN_FILES = 64  # per process
_BLOCK = 512  # tar's unit
_ABSENT = (0, 0)  # no member starts at byte 0: its header does
_KINDS = dict.fromkeys(IMAGE_EXTENSIONS, 0) | {"txt": 1, "json": 2}


class ShardPairs:
    """Pairs in tar files as img2dataset and webdataset write them.

    Members of one sample stand together and share the name up to the first dot: `jpg`, `jpeg`,
    `png` or `webp`, and `txt` or else `json` (its "caption"). The headers are read once, here; then
    each sample is one or two reads at known offsets.

    A file that is damaged is used up to the damage, and `damage` says where that is. A sample
    without an image or caption keeps its index and raises BadSample.

    Raises:
        UsageError: a file cannot be read or is compressed; no file holds a sample.
    """

    def __init__(self, paths: Sequence[str | Path]) -> None:
        self.paths = [str(path) for path in paths]
        self.damage: list[str] = []
        indices = [_index(path) for path in self.paths]
        self.damage = [i.damage for i in indices if i.damage]
        counts = [len(i.keys) for i in indices]
        if sum(counts) == 0:
            why = "; ".join(self.damage) or "no member named *.jpg, *.png or *.webp"
            raise UsageError(f"no samples in {', '.join(self.paths[:3])}: {why}")
        # Arrays, not objects: they stay shared between forked workers and are small.
        self._shard = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
        self._spans = np.concatenate([i.array() for i in indices])
        self._keys = np.array([key for i in indices for key in i.keys])

    def __len__(self) -> int:
        return len(self._keys)

    def __getitem__(self, index: int) -> Pair:
        path = self.paths[self._shard[index]]
        key = f"{os.path.basename(path)}:{self._keys[index]}"
        image, text, document = (tuple(int(v) for v in span) for span in self._spans[index])
        if image == _ABSENT:
            raise BadSample("no image", key)
        if text != _ABSENT:
            caption = _decode_text(_read(path, text, key), key)
        elif document != _ABSENT:
            caption = _caption_of(_read(path, document, key), key)
        else:
            raise BadSample("no caption", key)
        caption = clean_caption(caption, key)
        return Pair(decode_image(_read(path, image, key), key), caption, key)


@dataclass
class _Index:
    """Where the samples of one file are: rows of (offset, size) for image, txt and json."""

    keys: list[str] = field(default_factory=list)
    spans: list[list[tuple[int, int]]] = field(default_factory=list)
    damage: str = ""

    def array(self) -> np.ndarray:
        return np.array(self.spans, dtype=np.int64).reshape(-1, 3, 2)

    def add(self, member: tarfile.TarInfo) -> None:
        key, extension = base_plus_ext(member.name)
        kind = _KINDS.get((extension or "").lower())
        if key is None or kind is None:
            return
        if not self.keys or self.keys[-1] != key:
            self.keys.append(key)
            self.spans.append([_ABSENT] * 3)
        self.spans[-1][kind] = (member.offset_data, member.size)

    def drop_half_sample(self) -> None:
        """Drop the last sample if the damage took a part of it: it is counted as damage."""
        if not self.keys:
            return
        image, text, document = self.spans[-1]
        if image == _ABSENT or text == document == _ABSENT:
            self.keys.pop()
            self.spans.pop()


def _index(path: str) -> _Index:
    index = _Index()
    try:
        for member in _members(path):
            index.add(member)
    except _Damage as damage:
        index.drop_half_sample()
        index.damage = f"{path}: {damage}; {len(index.keys)} samples before that are used"
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from error
    return index


class _Damage(Exception):
    """A tar file cannot be followed further."""


def _members(path: str) -> Iterator[tarfile.TarInfo]:
    """Yield the regular, complete members of a tar file; raises _Damage where it breaks off."""
    if path.endswith((".gz", ".tgz", ".bz2", ".xz", ".zst")):
        raise UsageError(f"{path} is compressed and cannot be read at random; unpack it to .tar")
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        try:
            tar = tarfile.TarFile(fileobj=file)
            while (member := tar.next()) is not None:
                # tarfile would keep every header: too much for millions.
                tar.members.clear()  # type: ignore[attr-defined]
                if member.size < 0 or member.offset_data + member.size > size:
                    raise _Damage(f"breaks off inside {member.name}")
                if member.isreg():
                    yield member
            # tarfile ends quietly at a header it cannot read; only zeros are the true end.
            file.seek(tar.offset)
            if file.read(_BLOCK) != bytes(_BLOCK):
                raise _Damage(f"no readable header at byte {tar.offset} of {size}")
        except (tarfile.TarError, ValueError, OverflowError, EOFError) as error:
            raise _Damage(str(error)) from error


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


def _caption_of(data: bytes, key: str) -> str:
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BadSample("unreadable json", key) from error
    if not isinstance(document, dict) or "caption" not in document:
        raise BadSample("no caption", key)
    return document["caption"]
