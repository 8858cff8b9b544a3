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

    images.npy: uint8 (n, 1, side, side); pairs.txt: key, id and caption per line, with tabs between
    them. benchmarks/draw_icons.py writes such a folder.

    The images are memory-mapped: the system caches as much of the file as fits, once for all
    processes.

    Raises:
        UsageError: a file is missing, damaged, or does not match the other one.
    """

    first = "image"

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.damage: list[str] = []
        try:
            self.images: np.ndarray = np.load(self.folder / IMAGES, mmap_mode="r")
            lines = (self.folder / PAIRS).read_text(encoding="utf-8").splitlines()
            rows = [line.split("\t") for line in lines]
            self._keys = np.array([key.encode() for key, _, _ in rows], dtype=np.bytes_)
            self._ids = np.array([int(number) for _, number, _ in rows], dtype=np.int64)
            # Fixed width: a list of objects would be copied, page by page, into every worker.
            self._captions = np.array([text.encode() for *_, text in rows], dtype=np.bytes_)
        except (OSError, ValueError) as error:
            raise UsageError(f"cannot read {self.folder}: {one_line(error)}") from error
        shape, dtype = self.images.shape, self.images.dtype
        if dtype != np.uint8 or len(shape) != 4 or shape[:2] != (len(rows), 1) or not rows:
            raise UsageError(
                f"{self.folder / IMAGES} has {dtype} of shape {shape}; expected uint8 of shape "
                f"({len(rows)}, 1, side, side), a picture for each line of {PAIRS}, 1 or more"
            )

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
