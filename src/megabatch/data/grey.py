"""Grey images of one size in one file, with captions: they need no decoding or drawing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from megabatch.data.pairs import Pair
from megabatch.errors import UsageError, one_line

IMAGES, PAIRS = "images.npy", "pairs.txt"


class GreyPairs:
    """A folder with `images.npy` and `pairs.txt` as a data set; none of its samples is bad.

    images.npy: uint8 (n, 1, side, side), memory-mapped; pairs.txt: key, id and caption per line,
    with tabs between them. benchmarks/draw_icons.py writes such a folder.

    Raises:
        UsageError: a file is missing, damaged, or does not match the other one.
    """

    def __init__(self, folder: str | Path) -> None:
        try:
            self.images: np.ndarray = np.load(Path(folder) / IMAGES, mmap_mode="r")
            lines = (Path(folder) / PAIRS).read_text(encoding="utf-8").splitlines()
            keys, ids, captions = zip(*(line.split("\t") for line in lines), strict=True)
            # Fixed width: a list of objects would be copied, page by page, into every worker.
            self._keys, self._captions = np.char.encode(keys), np.char.encode(captions)
            self._ids = np.array(ids).astype(np.int64)
            if self.images.dtype != np.uint8 or self.images.shape[:2] != (len(lines), 1):
                found = f"{self.images.dtype} of shape {self.images.shape}"
                expected = f"uint8 of shape ({len(lines)}, 1, side, side), as {PAIRS} has lines"
                raise ValueError(f"{IMAGES} has {found}; expected {expected}")
        except (OSError, ValueError) as error:
            raise UsageError(f"cannot read {folder}: {one_line(error)}") from error

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, index: int) -> Pair:
        caption, key = self._captions[index].decode(), self._keys[index].decode()
        return Pair(Image.fromarray(self.images[index, 0]), caption, key, int(self._ids[index]))

    def arrays(self, indices: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return images, uint8 (b, 1, side, side), of many samples at once."""
        return self.images[np.asarray(indices)]

    def texts(self, indices: Sequence[int] | np.ndarray) -> list[str]:
        """Return their captions."""
        return [caption.decode() for caption in self._captions[np.asarray(indices)]]

    def ids(self, indices: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return the pairs' ids, int64 (b,), equal for pairs that are not negatives."""
        return self._ids[np.asarray(indices)]


def is_grey_folder(path: str | Path) -> bool:
    """Whether a path is a folder of grey images, see `GreyPairs`."""
    return (Path(path) / IMAGES).is_file()
