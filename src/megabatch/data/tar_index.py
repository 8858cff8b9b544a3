"""Where the samples of a tar shard are."""

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

from megabatch.data.cache import default_cache_dir, read_arrays, write_arrays
from megabatch.errors import UsageError

IMAGE_EXTENSIONS = ("jpg", "jpeg", "png", "webp", "svg", "bmp", "ppm")
#: What a sample may have beside its image: a caption, a document of facts, a class index.
OTHERS = ("txt", "json", "cls")
KINDS = ("image", *OTHERS)
ABSENT = (0, 0)  # no member starts at byte 0: its header does

_KINDS = dict.fromkeys(IMAGE_EXTENSIONS, 0) | {name: KINDS.index(name) for name in OTHERS}
_BLOCK = tarfile.BLOCKSIZE
_MAGIC, _MAGIC_AT = b"ustar", 257  # of a member's header
_COMPRESSED = (b"\x1f\x8b", b"BZh", b"\xfd7zX", b"\x28\xb5\x2f\xfd")  # gzip, bzip2, xz, zstd
_COMPRESSED_NAMES = (".gz", ".tgz", ".bz2", ".xz", ".zst")
_VERSION = 3  # raise when the same file would give another index


@dataclass(frozen=True)
class TarIndex:
    """The samples of one file.

    keys: (n,) bytes, the members' names up to the first dot; spans: int64 (n, 4, 2), the offset
    and size of each of KINDS, ABSENT where there is none; damage: where the file breaks off and
    what is lost by that, empty if it is whole.
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
        if spans and _is_half(spans[-1]):  # the damage took the rest: counted there, once
            torn = keys.pop()
            spans.pop()
        damage = f"{path}: {error}; {_loss(path, error.offset, len(keys), torn)}"
    return TarIndex(
        np.array(keys, dtype=np.bytes_),
        np.array(spans, dtype=np.int64).reshape(-1, len(KINDS), 2),
        damage,
    )


def endings(path: str) -> list[str]:
    """The extensions of a file's members, for messages; of a damaged file those before that."""
    found: dict[str, None] = {}
    try:
        for member in _members(path):
            found.setdefault("." + (base_plus_ext(member.name)[1] or ""))
    except _Damage:
        pass
    return sorted(found)


def _sample_of(member: tarfile.TarInfo) -> tuple[bytes | None, int | None]:
    """A member's sample, and its place in KINDS; None where it has none."""
    key, extension = base_plus_ext(member.name)
    kind = _KINDS.get((extension or "").lower())
    return (None if key is None else key.encode("utf-8", "surrogateescape")), kind


def _is_half(spans: list[tuple[int, int]]) -> bool:
    image, *others = spans
    return image == ABSENT or all(span == ABSENT for span in others)


class _Damage(Exception):
    """A tar file cannot be followed further than `offset`."""

    def __init__(self, why: str, offset: int) -> None:
        super().__init__(why)
        self.offset = offset


def _members(path: str) -> Iterator[tarfile.TarInfo]:
    """Yield the regular, complete members of a tar file; raises _Damage where it breaks off."""
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
                # tarfile would keep every header: too much for millions.
                tar.members.clear()  # type: ignore[attr-defined]
                if member.size < 0 or member.offset_data + member.size > size:
                    raise _Damage(
                        f"breaks off inside {member.name}, at byte {size:,}", member.offset
                    )
                if member.isreg():
                    yield member
                offset = tar.offset
            # tarfile ends quietly at a header it cannot read; only zeros are the true end.
            file.seek(tar.offset)
            if file.read(_BLOCK) != bytes(_BLOCK):
                raise _Damage(_no_header(tar.offset, size), tar.offset)
        except (tarfile.TarError, ValueError, OverflowError, EOFError) as error:
            why = f"{error} at byte {offset:,} of {size:,}"
            raise _Damage(_no_header(offset, size) if offset >= size else why, offset) from error


def _no_header(offset: int, size: int) -> str:
    """What is wrong where the next header should be; the last one's padding may be cut too."""
    if offset >= size:
        return f"breaks off at byte {size:,}, without tar's end mark"
    return f"no readable header at byte {offset:,} of {size:,}"


def _loss(path: str, offset: int, used: int, torn: bytes | None) -> str:
    """In words, how many samples are used of a file that is damaged at `offset`, and how many not.

    `torn`: the sample in which the damage is, if it had begun.
    """
    before = f"the {used:,} samples before that are used"
    if (counted := _counted(path)) is not None and counted >= used:
        return f"{before}, {counted - used:,} of {counted:,} are lost"
    later = _keys_after(path, offset)
    if torn is not None:
        later.add(torn)
    lost = f"at least {len(later):,} are" if later else "what followed is"
    return f"{before}, {lost} lost"


def _counted(path: str) -> int | None:
    """How many samples img2dataset put into a shard, by the statistics that it left beside."""
    stats = Path(path).with_name(Path(path).stem + "_stats.json")
    try:
        count = json.loads(stats.read_text(encoding="utf-8"))["successes"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return count if type(count) is int else None


def _keys_after(path: str, offset: int) -> set[bytes]:
    """The samples whose members' headers can be read behind a damaged place."""
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
