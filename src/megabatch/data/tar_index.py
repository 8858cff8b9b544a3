"""Where the samples of a tar shard are."""

from __future__ import annotations

import hashlib
import os
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from webdataset.tariterators import base_plus_ext

from megabatch.data.cache import default_cache_dir, read_arrays, write_arrays
from megabatch.errors import UsageError

IMAGE_EXTENSIONS = ("jpg", "jpeg", "png", "webp", "svg")
ABSENT = (0, 0)  # no member starts at byte 0: its header does

_KINDS = dict.fromkeys(IMAGE_EXTENSIONS, 0) | {"txt": 1, "json": 2}
_BLOCK = 512  # tar's unit
_VERSION = 2  # raise when the same file would give another index


@dataclass(frozen=True)
class TarIndex:
    """The samples of one file.

    keys: (n,) bytes, the members' names up to the first dot; spans: int64 (n, 3, 2), the offset
    and size of image, txt and json, ABSENT where there is none; damage: where the file breaks off,
    empty if it is whole.
    """

    keys: np.ndarray
    spans: np.ndarray
    damage: str


def tar_index(path: str) -> TarIndex:
    """Return the index of a file, from the cache if the file has not changed since.

    Reading the headers takes about 0.5 s for 10,000 samples: too long for each start of a run
    over hundreds of shards.

    Raises:
        UsageError: the file cannot be read, or is compressed.
    """
    try:
        facts = os.stat(path)
        identity = (_VERSION, os.path.abspath(path), facts.st_size, facts.st_mtime_ns)
        name = hashlib.sha256(repr(identity).encode()).hexdigest()[:32]
        cached = default_cache_dir() / "shards" / f"{name}.npz"
        if arrays := read_arrays(cached, ("keys", "spans", "damage")):
            return TarIndex(arrays["keys"], arrays["spans"], str(arrays["damage"]))
        index = read_index(path)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from error
    arrays = {"keys": index.keys, "spans": index.spans, "damage": np.array(index.damage)}
    write_arrays(cached, arrays)
    return index


def read_index(path: str) -> TarIndex:
    """Read the headers of a file; a damaged one is used up to the damage."""
    keys: list[bytes] = []
    spans: list[list[tuple[int, int]]] = []
    damage = ""
    try:
        for member in _members(path):
            key, extension = base_plus_ext(member.name)
            kind = _KINDS.get((extension or "").lower())
            if key is None or kind is None:
                continue
            encoded = key.encode("utf-8", "surrogateescape")
            if not keys or keys[-1] != encoded:
                keys.append(encoded)
                spans.append([ABSENT] * 3)
            if spans[-1][kind] == ABSENT:  # of two images in a sample, the first
                spans[-1][kind] = (member.offset_data, member.size)
    except _Damage as error:
        if spans and _is_half(spans[-1]):  # the damage took the rest: counted there, once
            keys.pop()
            spans.pop()
        damage = f"{path}: {error}; the {len(keys)} samples before that are used"
    return TarIndex(
        np.array(keys, dtype=np.bytes_), np.array(spans, dtype=np.int64).reshape(-1, 3, 2), damage
    )


def _is_half(spans: list[tuple[int, int]]) -> bool:
    image, text, document = spans
    return image == ABSENT or text == document == ABSENT


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
