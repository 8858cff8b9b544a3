"""The image files that a table or list names."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megabatch.data.pairs import BadSample
from megabatch.errors import UsageError

_URLS = ("http://", "https://", "s3://", "gs://", "ftp://")


@dataclass(frozen=True)
class ImageFiles:
    """Files by name.

    folders: searched in order for a relative name.
    """

    folders: tuple[Path, ...]

    @classmethod
    def beside(cls, path: Path) -> ImageFiles:
        """For names relative to a list's folder, else to the working directory as in OpenCLIP."""
        folder, here = path.parent, Path.cwd()
        return cls((folder,) if folder.resolve() == here.resolve() else (folder, here))

    def read(self, value: Any, key: str) -> bytes:
        """Return the bytes of an image file.

        Args:
            value: its name, its bytes, or Hugging Face's struct {bytes, path}.
            key: names the sample.

        Raises:
            BadSample: there is no such file, or it cannot be read.
        """
        if isinstance(value, dict):  # the bytes, or else the path
            value = value.get("bytes") or value.get("path")
        data = value if isinstance(value, bytes) else self._read_file(value, key)
        if not data:
            raise BadSample("empty image file", key)
        return data

    def check(self, names: Iterable[Any], source: object) -> None:
        """Raise a UsageError if there are file names among `names`, but no such file.

        Other values than names are left out; `source` is the list, for the message.
        """
        missing: BadSample | None = None
        for name in names:
            try:
                if isinstance(name, str) and name:
                    self._read_file(name, repr(name))
                    return
            except BadSample as sample:
                missing = missing or sample
        if missing is not None:
            raise UsageError(f"{source}: none of its image files exists: {missing.key}")

    def _read_file(self, name: Any, key: str) -> bytes:
        if not isinstance(name, str) or not name:
            raise BadSample("no image", key)
        reason = "missing image file"
        paths = list(dict.fromkeys(folder / name for folder in self.folders))
        for path in paths:
            try:
                return path.read_bytes()
            except (FileNotFoundError, NotADirectoryError, ValueError):
                continue
            except OSError:
                reason = "unreadable image file"
        fault = "tried " + " and ".join(map(str, paths))
        if name.lower().startswith(_URLS):
            fault = "a URL, and nothing is downloaded (img2dataset makes shards of URLs)"
        raise BadSample(reason, f"{key}, {fault}")
