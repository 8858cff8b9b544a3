"""The image files that a table or list names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megabatch.data.pairs import BadSample
from megabatch.errors import UsageError

_CHECKED = 1_000  # files, when a list is opened
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

    def look(
        self, n: int, name_of: Callable[[int], Any], key_of: Callable[[int], str], source: object
    ) -> list[str]:
        """Check whether up to a thousand of the files exist, spread evenly; describe missing ones.

        Args:
            n: number of samples.
            name_of: returns the image of a sample; only file names are checked.
            key_of: returns the name of a sample in messages.
            source: the list that names the files, for messages.

        Raises:
            UsageError: none of them exists.
        """
        count = min(n, _CHECKED)
        rows = np.linspace(0, n - 1, count).astype(np.int64).tolist()
        found = [(i, name) for i in rows if isinstance(name := name_of(i), str) and name]
        missing = [(i, name) for i, name in found if not self._exists(name)]
        if not missing:
            return []
        first, name = missing[0]
        where = f"{name!r} ({key_of(first)}), {self._fault(name)}"
        if len(missing) < len(found):
            return [
                f"{source}: {len(missing):,} of {len(found):,} image files that were checked are "
                f"missing, the first is {where}"
            ]
        all_of = f"of {len(found):,} looked at " if count < n else ""
        raise UsageError(
            f"{source}: none of its image files exists: the first of {len(missing):,} missing "
            f"ones {all_of}is {where}"
        )

    def _read_file(self, name: Any, key: str) -> bytes:
        if not isinstance(name, str) or not name:
            raise BadSample("no image", key)
        reason = "missing image file"
        for path in self._candidates(name):
            try:
                return path.read_bytes()
            except (FileNotFoundError, NotADirectoryError, ValueError):
                continue
            except OSError:
                reason = "unreadable image file"
        raise BadSample(reason, f"{key}, {self._fault(name)}")

    def _exists(self, name: str) -> bool:
        try:
            return any(path.exists() for path in self._candidates(name))
        except (OSError, ValueError):  # a name that is too long, or has a NUL
            return False

    def _candidates(self, name: str) -> list[Path]:
        return list(dict.fromkeys(folder / name for folder in self.folders))

    def _fault(self, name: str) -> str:
        if name.lower().startswith(_URLS):
            return "a URL, and nothing is downloaded (img2dataset makes shards of URLs)"
        return "tried " + " and ".join(map(str, self._candidates(name)))
