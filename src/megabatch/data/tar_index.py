"""The index of a tar shard: its samples, with offset and size of each member."""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from webdataset.tariterators import base_plus_ext

from megabatch.data.cache import read_arrays, write_arrays
from megabatch.errors import UsageError, are, plural
from megabatch.files import default_cache_dir

IMAGE_EXTENSIONS = ("jpg", "jpeg", "png", "webp", "bmp", "ppm")
#: Members of a sample besides its image: a caption, a JSON document, a class index.
OTHERS = ("txt", "json", "cls")
KINDS = ("image", *OTHERS)
ABSENT = (0, 0)  # no member starts at byte 0: its header does

_KINDS = dict.fromkeys(IMAGE_EXTENSIONS, 0) | {name: KINDS.index(name) for name in OTHERS}
_BLOCK = tarfile.BLOCKSIZE
_MAGIC, _MAGIC_AT = b"ustar", 257  # of a member's header
_COMPRESSED = (b"\x1f\x8b", b"BZh", b"\xfd7zX", b"\x28\xb5\x2f\xfd")  # gzip, bzip2, xz, zstd
_COMPRESSED_NAMES = (".gz", ".tgz", ".bz2", ".xz", ".zst")
_VERSION = 4  # increase it when the same file would give another index


@dataclass(frozen=True)
class TarIndex:
    """The samples of one file.

    keys: (n,) bytes, the members' names up to the first dot; spans: int64 (n, 4, 2), the offset
    and size of each of KINDS, ABSENT if there is none; damage: where the file breaks off and how
    much is lost, empty if it is complete.
    """

    keys: np.ndarray
    spans: np.ndarray
    damage: str


def tar_index(path: str) -> TarIndex:
    """Return the index of a file, from the cache if the file has not changed since.

    Reading the headers takes about 0.5 s for 10,000 samples: too long at each start of a run with
    hundreds of shards.

    Raises:
        UsageError: the file cannot be read, or is compressed.
    """
    try:
        stat = os.stat(path)
        identity = (_VERSION, os.path.abspath(path), stat.st_size, stat.st_mtime_ns)
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
            key, kind = _sample_of(member)
            if key is None or kind is None:
                continue
            if not keys or keys[-1] != key:
                keys.append(key)
                spans.append([ABSENT] * len(KINDS))
            if spans[-1][kind] == ABSENT:  # of two images in a sample, the first
                spans[-1][kind] = (member.offset_data, member.size)
    except _Damage as error:
        torn = None
        if spans and _is_incomplete(spans[-1]):  # it counts as lost
            torn = keys.pop()
            spans.pop()
        damage = f"{path}: {error}; {_loss(path, error.offset, len(keys), torn)}"
    return TarIndex(
        np.array(keys, dtype=np.bytes_),
        np.array(spans, dtype=np.int64).reshape(-1, len(KINDS), 2),
        damage,
    )


def endings(path: str) -> list[str]:
    """The extensions of a file's members, for messages; if it is damaged, of those before that."""
    found: dict[str, None] = {}
    try:
        for member in _members(path):
            found.setdefault("." + (base_plus_ext(member.name)[1] or ""))
    except _Damage:
        pass
    return sorted(found)


def _sample_of(member: tarfile.TarInfo) -> tuple[bytes | None, int | None]:
    """A member's sample and its index in KINDS; None if it has none."""
    key, extension = base_plus_ext(member.name)
    kind = _KINDS.get((extension or "").lower())
    return (None if key is None else key.encode("utf-8", "surrogateescape")), kind


def _is_incomplete(spans: list[tuple[int, int]]) -> bool:
    image, *others = spans
    return image == ABSENT or all(span == ABSENT for span in others)


class _Damage(Exception):
    """A tar file cannot be followed further than `offset`."""

    def __init__(self, why: str, offset: int) -> None:
        super().__init__(why)
        self.offset = offset


def _members(path: str) -> Iterator[tarfile.TarInfo]:
    """Yield the regular, complete members of a tar file; raises _Damage if it breaks off."""
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        if path.endswith(_COMPRESSED_NAMES) or file.read(4).startswith(_COMPRESSED):
            raise UsageError(
                f"{path} is compressed and cannot be read at random; unpack it to .tar"
            )
        if size == 0:
            raise _Damage("the file is empty (0 bytes)", 0)
        file.seek(0)
        offset = 0
        try:
            tar = tarfile.TarFile(fileobj=file)
            while (member := tar.next()) is not None:
                # Otherwise tarfile keeps every header: too much memory for millions.
                tar.members.clear()  # type: ignore[attr-defined]
                if member.size < 0 or member.offset_data + member.size > size:
                    raise _Damage(
                        f"breaks off inside {member.name}, at byte {size:,}", member.offset
                    )
                if member.isreg():
                    yield member
                offset = tar.offset
            # tarfile ends silently at an unreadable header; the true end is a block of zeros.
            file.seek(tar.offset)
            if file.read(_BLOCK) != bytes(_BLOCK):
                raise _Damage(_no_header(tar.offset, size), tar.offset)
        except (tarfile.TarError, ValueError, OverflowError, EOFError) as error:
            why = f"{error} at byte {offset:,} of {size:,}"
            raise _Damage(_no_header(offset, size) if offset >= size else why, offset) from error


def _no_header(offset: int, size: int) -> str:
    """A description of the missing header; the padding before it may be cut off, too."""
    if offset >= size:
        return f"breaks off at byte {size:,}, without tar's end mark"
    return f"no readable header at byte {offset:,} of {size:,}"


def _loss(path: str, offset: int, used: int, torn: bytes | None) -> str:
    """A description of how many samples of a file damaged at `offset` are used, and how many lost.

    `torn`: the incomplete sample at the damage, if any.
    """
    before = f"the {plural(used, 'sample')} before that {are(used)} used"
    if (total := _count_in_stats(path)) is not None and total >= used:
        return f"{before}, {total - used:,} of {total:,} {are(total - used)} lost"
    later = _keys_after(path, offset)
    if torn is not None:
        later.add(torn)
    lost = f"at least {len(later):,} {are(len(later))}" if later else "what followed is"
    return f"{before}, {lost} lost"


def _count_in_stats(path: str) -> int | None:
    """The number of samples in a shard, from the statistics that img2dataset writes next to it."""
    stats = Path(path).with_name(Path(path).stem + "_stats.json")
    try:
        count = json.loads(stats.read_text(encoding="utf-8"))["successes"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return count if type(count) is int else None


def _keys_after(path: str, offset: int) -> set[bytes]:
    """The samples with a readable member header after a damaged place."""
    found: set[bytes] = set()
    if offset >= os.path.getsize(path):
        return found
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        at = data.find(_MAGIC, offset)
        while at >= 0:
            start = at - _MAGIC_AT
            if start >= 0 and start % _BLOCK == 0:
                try:
                    member = tarfile.TarInfo.frombuf(
                        data[start : start + _BLOCK], "utf-8", "surrogateescape"
                    )
                except tarfile.HeaderError:
                    pass
                else:
                    key, kind = _sample_of(member)
                    if key is not None and kind is not None:
                        found.add(key)
            at = data.find(_MAGIC, at + 1)
    return found
