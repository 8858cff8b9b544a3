"""Decoding images, now or later, and the image files that a table names."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from megabatch.data.pairs import BadSample, EncodedImage


@dataclass(frozen=True)
class DeferredImage:
    """A file (or an image, from a source without files) and the seed of its augmentation."""

    image: EncodedImage | Image.Image
    seed: int

    @classmethod
    def keep(cls, image: EncodedImage | Image.Image) -> DeferredImage:
        """Replace a transform: keep the image, and the seed that the transform would have had."""
        return cls(image, torch.initial_seed())


def decoded(image: Any) -> Any:
    """An image or text as it is, an EncodedImage decoded; raises BadSample if that fails."""
    return image.decode() if isinstance(image, EncodedImage) else image


def transformed(transform: Callable[[Any], Any], image: Any) -> Any:
    """Transform an image or text; an EncodedImage is decoded; raises BadSample if that fails.

    A transform's method `from_bytes`, if it has one, gets files as they are, such as sounds, and a
    method `pixels` colour JPEG files as arrays (see `EncodedImage.pixels`), which costs less than
    Pillow's image.
    """
    if isinstance(image, EncodedImage) and hasattr(transform, "from_bytes"):
        try:
            return transform.from_bytes(image.data)
        except Exception as error:  # of any library
            raise BadSample(f"unreadable file ({type(error).__name__})", image.key) from error
    from_array: Any = getattr(transform, "pixels", None)
    pixels = image.pixels() if from_array and isinstance(image, EncodedImage) else None
    return transform(decoded(image)) if pixels is None else from_array(pixels)


@dataclass(frozen=True)
class ImageFiles:
    """Files by name; folders: searched in order for a relative one."""

    folders: tuple[Path, ...]

    @classmethod
    def beside(cls, path: Path) -> ImageFiles:
        """For names relative to a list's folder, else to the working directory as in OpenCLIP."""
        folder, here = path.parent, Path.cwd()
        return cls((folder,) if folder.resolve() == here.resolve() else (folder, here))

    def read(self, value: Any, key: str) -> bytes:
        """Return the bytes of an image file; BadSample if there is none, or it cannot be read.

        value: its name, its bytes, or Hugging Face's struct {bytes, path}; key: names the sample.
        """
        if isinstance(value, dict):  # the bytes, or else the path
            value = value.get("bytes") or value.get("path")
        data = value if isinstance(value, bytes) else self._read_file(value, key)
        if not data:
            raise BadSample("empty image file", key)
        return data

    def _read_file(self, name: Any, key: str) -> bytes:
        if not isinstance(name, str) or not name:
            raise BadSample("no image", key)
        paths = list(dict.fromkeys(folder / name for folder in self.folders))
        for path in paths:
            with contextlib.suppress(OSError, ValueError):
                return path.read_bytes()
        tried = " and ".join(map(str, paths))
        raise BadSample("missing or unreadable image file", f"{key}, tried {tried}")
