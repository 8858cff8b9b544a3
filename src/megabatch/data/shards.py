"""WebDataset tar shards, read at random through an index of their headers."""

from __future__ import annotations

import functools
import io
import json
import os
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from webdataset.tariterators import base_plus_ext

from megabatch.data.cache import cached_arrays
from megabatch.data.pairs import BadSample, EncodedImage, Pair, clean_caption
from megabatch.errors import UsageError, plural

IMAGE_EXTENSIONS = ("jpg", "jpeg", "png", "webp", "bmp", "ppm")
AUDIO_EXTENSIONS = ("wav", "flac", "mp3", "ogg")
#: Members of a sample: its image, a caption, a JSON document, a class index, a sound.
KINDS = ("image", "txt", "json", "cls", "audio")
_KINDS = dict.fromkeys(IMAGE_EXTENSIONS, 0) | dict.fromkeys(AUDIO_EXTENSIONS, 4)
_KINDS |= {name: KINDS.index(name) for name in KINDS[1:4]}
ABSENT = (0, 0)  # no member starts at byte 0: its header does

_OPEN_FILES = 64  # per process
_VERSION = 6  # increase it when the same file would give another index


def tar_index(path: str) -> dict[str, np.ndarray]:
    """Return the index of a file, from the cache if the file has not changed since.

    Reading the headers takes about 0.5 s for 10,000 samples: too long at each start of a run with
    hundreds of shards. A sample is adjacent members that share their name up to the first dot.

    Returns:
        keys: (n,) bytes, these names; spans: int64 (n, 5, 2), the offset and size of each of KINDS,
        ABSENT if there is none; damage: where the file breaks off, empty if it is complete.

    Raises:
        UsageError: the file cannot be read.
    """
    try:
        stat = os.stat(path)
        identity = (_VERSION, os.path.abspath(path), stat.st_size, stat.st_mtime_ns)
        return cached_arrays("shards", identity, lambda: _read_index(path, stat.st_size))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from error


def _read_index(path: str, size: int) -> dict[str, Any]:
    """Read the headers of a file; a damaged one is used up to the damage."""
    keys: list[bytes] = []
    spans: list[list[tuple[int, int]]] = []
    damage, offset = "", 0
    with open(path, "rb") as file:
        try:
            tar = tarfile.TarFile(fileobj=file)
            while (member := tar.next()) is not None:
                # Otherwise tarfile keeps every header: too much memory for millions.
                tar.members.clear()  # type: ignore[attr-defined]
                if member.size < 0 or member.offset_data + member.size > size:
                    raise tarfile.ReadError(f"breaks off inside {member.name}")
                if member.isreg():
                    _add(member, keys, spans)
                offset = tar.offset
            # tarfile ends silently at an unreadable header; the true end is a block of zeros.
            file.seek(offset)
            if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
                raise tarfile.ReadError("breaks off without a readable header")
        except (tarfile.TarError, ValueError, OverflowError, EOFError) as error:
            used = f"used up to there ({plural(len(keys), 'sample')})"
            damage = f"{path}: {error}, at byte {offset:,} of {size:,}; {used}"
    found = np.array(spans, dtype=np.int64).reshape(-1, len(KINDS), 2)
    return {"keys": np.array(keys, dtype=np.bytes_), "spans": found, "damage": damage}


def _add(member: tarfile.TarInfo, keys: list[bytes], spans: list[list[tuple[int, int]]]) -> None:
    """Add a member to its sample; of two images in a sample, the first counts."""
    name, extension = base_plus_ext(member.name)
    kind = _KINDS.get((extension or "").lower())
    if name is None or kind is None:
        return
    key = name.encode("utf-8", "surrogateescape")
    if not keys or keys[-1] != key:
        keys.append(key)
        spans.append([ABSENT] * len(KINDS))
    if spans[-1][kind] == ABSENT:
        spans[-1][kind] = (member.offset_data, member.size)


class TarSamples:
    """The samples of tar files, see `tar_index`.

    A member is one read at a known offset. `damage`: a line for each file that breaks off.

    Raises:
        UsageError: a file cannot be read; no file has a sample.
    """

    def __init__(self, paths: Sequence[str | Path]) -> None:
        self.paths = [str(path) for path in paths]
        indices = [tar_index(path) for path in self.paths]
        # These tell an open file from one that has replaced it since.
        self._mtimes = [os.stat(path).st_mtime_ns for path in self.paths]
        self.damage = [line for index in indices if (line := str(index["damage"]))]
        counts = [len(index["keys"]) for index in indices]
        if sum(counts) == 0:
            why = "; ".join(self.damage) or f"no member ends in {', '.join(_KINDS)}"
            raise UsageError(f"no samples in {', '.join(self.paths[:3])}: {why}")
        # Arrays, not lists: they are small and stay shared between forked workers.
        self._shard = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
        self._spans = np.concatenate([index["spans"] for index in indices])
        self._keys = np.concatenate([index["keys"] for index in indices])

    def __len__(self) -> int:
        return len(self._keys)

    def key(self, index: int) -> str:
        """The sample's name in messages."""
        name = os.path.basename(self.paths[self._shard[index]])
        return f"{name}:{self._keys[index].decode(errors='replace')}"

    def has(self, index: int, kind: str) -> bool:
        """Whether the sample has a member of that kind."""
        return bool(self._spans[index, KINDS.index(kind), 0])

    def read(self, index: int, kind: str) -> bytes:
        """Return a member's bytes; BadSample if there is none or it cannot be read."""
        key = self.key(index)
        if not self.has(index, kind):
            raise BadSample(f"no {kind}", key)
        offset, size = self._spans[index, KINDS.index(kind)].tolist()
        number = self._shard[index]
        try:
            data = _read(self.paths[number], self._mtimes[number], offset, size)
            if len(data) != size:
                raise EOFError
        except (OSError, EOFError) as error:
            raise BadSample("unreadable shard", key) from error
        return data

    def image(self, index: int) -> Image.Image:
        """Return the sample's image; BadSample if it has none or it cannot be decoded."""
        return EncodedImage(self.read(index, "image"), self.key(index)).decode()


def _read(path: str, mtime: int, offset: int, size: int) -> bytes:
    if not hasattr(os, "pread"):  # Windows
        with open(path, "rb") as file:
            file.seek(offset)
            return file.read(size)
    # A positioned read: processes that share a descriptor also share its file position.
    return os.pread(_open_file(path, mtime).fileno(), size, offset)


@functools.lru_cache(maxsize=_OPEN_FILES)
def _open_file(path: str, mtime: int) -> io.FileIO:
    return open(path, "rb", buffering=0)


class ShardPairs(TarSamples):
    """Pairs in tar files as img2dataset and webdataset write them.

    A sample's caption is its `txt`, or else "caption" in its `json`; without one, or an image or
    else a sound, the sample is a bad one.
    """

    def __getitem__(self, index: int) -> Pair:
        key = self.key(index)
        sound = self.has(index, "audio") and not self.has(index, "image")
        image = EncodedImage(self.read(index, "audio" if sound else "image"), key)
        kind = "txt" if self.has(index, "txt") else "json"
        if not self.has(index, kind):
            raise BadSample("no caption", key)
        data = self.read(index, kind)
        try:
            caption: Any = data.decode("utf-8-sig") if kind == "txt" else json.loads(data)
        except (ValueError, RecursionError) as error:
            raise BadSample(f"unreadable {kind}", key) from error
        if kind == "json":
            caption = caption.get("caption") if isinstance(caption, dict) else None
        return Pair(image, clean_caption(caption, key), key)
