"""Writing grey images of one size with captions, which `megabatch.data.grey.GreyPairs` reads."""

from __future__ import annotations

import os
from pathlib import Path
from typing import IO

import numpy as np

from megabatch.data.grey import IMAGES, PAIRS


class GreyWriter:
    """Writes `images.npy`, uint8 (n, 1, size, size), and `pairs.txt`: key, id and caption per line.

    Images are written one by one, so there may be more than fit in memory.
    """

    def __init__(self, folder: Path, size: int) -> None:
        folder.mkdir()
        self.size = size
        self.count = 0
        self._images: IO[bytes] = (folder / IMAGES).open("wb")
        self._pairs = (folder / PAIRS).open("w", encoding="utf-8", newline="\n")
        self._write_header()

    def write(self, pixels: bytes, *, key: str, number: int, caption: str) -> None:
        """Add one pair.

        Args:
            pixels: size * size bytes.
            key: names the sample.
            number: its id.
            caption: runs of white space become single spaces.
        """
        if len(pixels) != self.size**2:
            raise ValueError(f"pixels: {len(pixels)} bytes; expected {self.size}²")
        self._images.write(pixels)
        self._pairs.write(f"{' '.join(key.split())}\t{number}\t{' '.join(caption.split())}\n")
        self.count += 1

    def close(self) -> None:
        """Finish both files."""
        self._images.seek(0, os.SEEK_SET)
        self._write_header()
        self._images.close()
        self._pairs.close()

    def _write_header(self) -> None:
        # numpy pads the header so that the first axis may grow: its length stays the same.
        shape = (self.count, 1, self.size, self.size)
        header = {"descr": "|u1", "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(self._images, header)
