"""Any members of WebDataset samples, by index: what labels and lists of captions are read from."""

from __future__ import annotations

import contextlib
import os
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from PIL import Image
from webdataset.tariterators import base_plus_ext

from megabatch.data.pairs import BadSample, decode_image
from megabatch.errors import UsageError

IMAGE_EXTENSIONS = ("jpg", "jpeg", "png", "webp", "ppm", "bmp", "svg")

_COMPRESSED = (b"\x1f\x8b", b"BZh", b"\xfd7zX", b"\x28\xb5\x2f\xfd")  # gzip, bzip2, xz, zstd

Members = dict[str, tuple[int, int]]  # by extension: offset and size in the file


class TarSamples:
    """The samples of tar files: members that stand together and share a name up to the first dot.

    The headers are read once, here; then each member is one read at a known offset. A file that is
    damaged is used up to the damage, and `damage` says where that is.

    Raises:
        UsageError: a file cannot be read or is compressed.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self.damage: list[str] = []
        self._samples = [
            (path, key, members) for path in paths for key, members in _index(path, self.damage)
        ]

    def __len__(self) -> int:
        return len(self._samples)

    def key(self, index: int) -> str:
        """What names the sample in messages."""
        path, key, _ = self._samples[index]
        return f"{path.name}:{key}"

    def has(self, index: int, extension: str) -> bool:
        """Whether the sample has a member of that extension."""
        return extension in self._samples[index][2]

    def read(self, index: int, extension: str) -> bytes:
        """A member's bytes; BadSample if there is none or it cannot be read."""
        path, _, members = self._samples[index]
        if extension not in members:
            raise BadSample(f"no {extension}", self.key(index))
        offset, size = members[extension]
        try:
            with path.open("rb") as file:
                file.seek(offset)
                data = file.read(size)
        except OSError as error:
            raise BadSample("unreadable shard", self.key(index)) from error
        if len(data) != size:
            raise BadSample("unreadable shard", self.key(index))
        return data

    def image(self, index: int) -> Image.Image:
        """The sample's picture; BadSample if it has none or it cannot be decoded."""
        for extension in IMAGE_EXTENSIONS:
            if self.has(index, extension):
                return decode_image(self.read(index, extension), self.key(index))
        raise BadSample("no image", self.key(index))


def first_members(path: Path) -> dict[str, bytes]:
    """The members of the first sample in a file, by extension."""
    with contextlib.suppress(tarfile.TarError), path.open("rb") as file:
        for _, members in _samples(_members(path)):
            spans = members.items()
            return {kind: os.pread(file.fileno(), size, at) for kind, (at, size) in spans}
    return {}


def _index(path: Path, damage: list[str]) -> list[tuple[str, Members]]:
    found: list[tuple[str, Members]] = []
    try:
        found.extend(_samples(_members(path)))
    except tarfile.TarError as error:
        damage.append(f"{path}: {error}; the {len(found)} samples before that are used")
    return found


def _samples(members: Iterator[tuple[str, str, int, int]]) -> Iterator[tuple[str, Members]]:
    key, sample = "", Members()
    damage = None
    try:
        for name, extension, offset, size in members:
            if name != key and sample:
                yield key, sample
                sample = {}
            key = name
            sample.setdefault(extension, (offset, size))
    except tarfile.TarError as error:
        damage = error
    if sample:  # also where the file breaks off behind it: what is there can be read
        yield key, sample
    if damage is not None:
        raise damage


def _members(path: Path) -> Iterator[tuple[str, str, int, int]]:
    """Name, extension, offset and size of each whole member; TarError where the file breaks off."""
    try:
        with path.open("rb") as file:
            if file.read(4).startswith(_COMPRESSED):
                raise UsageError(f"{path} is compressed and cannot be read at random; unpack it")
            size = file.seek(0, os.SEEK_END)
            file.seek(0)
            tar = tarfile.TarFile(fileobj=file)
            while (member := tar.next()) is not None:
                tar.members.clear()  # type: ignore[attr-defined]  # it would keep every header
                if member.offset_data + member.size > size:
                    raise tarfile.ReadError(f"breaks off inside {member.name}")
                name, extension = base_plus_ext(member.name)
                if member.isreg() and name is not None:
                    yield name, (extension or "").lower(), member.offset_data, member.size
            # tarfile ends quietly at a header that it cannot read; only zeros are the true end.
            file.seek(tar.offset)
            if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
                raise tarfile.ReadError(f"no readable header at byte {tar.offset} of {size}")
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from error
