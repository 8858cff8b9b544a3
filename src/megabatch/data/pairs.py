"""The interface of a source of pairs, and decoding of images."""

from __future__ import annotations

import hashlib
import io
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import simplejpeg
import torch
from PIL import Image

# Above a limit (89 million pixels) Pillow warns, in each worker anew, and decodes; above twice the
# limit it refuses, and the sample is a bad one. Last, so that the user's own filters come before.
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning, append=True)


@dataclass(frozen=True)
class Pair:
    """One image with its caption; `key` is the sample's constant name in messages.

    In a pair of texts `image` is the first text, such as the query to a passage.
    `id`, 0 <= id < 2**62: pairs with equal ids are not negatives of each other. None: pairs with
    equal captions are not.
    `negatives`: hard negatives, texts that look right but are not, if the source has any.
    """

    image: Image.Image | str
    caption: str
    key: str
    id: int | None = None
    negatives: tuple[str, ...] = ()


def caption_id(caption: str) -> int:
    """A caption's id: a hash of 62 bits, so 0 <= id < 2**62; equal captions have equal ids."""
    digest = hashlib.blake2b(caption.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2


class BadSample(Exception):
    """A sample that cannot be used; it is skipped and counted.

    `reason` is short and the same for all samples with the same fault, so that it can be counted;
    `key` names the sample.
    """

    def __init__(self, reason: str, key: str) -> None:
        super().__init__(reason, key)
        self.reason = reason
        self.key = key

    def __str__(self) -> str:
        return f"{self.reason}: {self.key}"


@runtime_checkable
class PairDataset(Protocol):
    """Pairs by index.

    Every source is indexed once and then read at random; none is streamed. A stream with a shuffle
    buffer is only roughly shuffled, cannot be resumed without reading everything again, and repeats
    samples if workers share shards unevenly. An index gives an exact permutation in each epoch,
    exact resuming (from one number), and each sample at most once per epoch.

    A source may also have `damage: list[str]`, a line for each part of its files that cannot be
    read; `notes: list[str]`, other remarks that a user should see before it is used; `first`,
    "text" if its pairs are of two texts (the default is "image"); and `parts`, if an epoch is not
    each of its samples once (see `megabatch.data.order.Part`).
    """

    def __len__(self) -> int:
        """Number of samples, bad ones included."""
        ...

    def __getitem__(self, index: int, /) -> Pair:
        """Sample `index`; raises BadSample if it cannot be used."""
        ...


@runtime_checkable
class ArrayDataset(PairDataset, Protocol):
    """A source of images of one size that also returns many at once; none of its samples is bad.

    It is used so with a transform that has `batch` (see BatchTransform), which is many times faster
    for small images. It may also have `ids(indices)`, the pairs' ids, int64 (b,).
    """

    def arrays(self, indices: Sequence[int] | np.ndarray, /) -> np.ndarray:
        """Return images, uint8 (b, channels, height, width)."""
        ...

    def texts(self, indices: Sequence[int] | np.ndarray, /) -> list[str]:
        """Return their captions, the same each time."""
        ...


@runtime_checkable
class BatchTransform(Protocol):
    """A transform that also takes many images of one size at once."""

    def __call__(self, image: Image.Image, /) -> torch.Tensor:
        """Transform one image."""
        ...

    def batch(self, images: torch.Tensor, seeds: torch.Tensor, /) -> torch.Tensor:
        """Transform images, uint8 (b, channels, height, width).

        Randomness, if any, must come from `seeds`, int64 (b,), at least 0: one per sample, a
        function of seed, epoch and index alone, so that no sample depends on its neighbours.
        """
        ...


@runtime_checkable
class TextTransform(Protocol):
    """A transform of first texts that also takes many at once, which is faster."""

    def texts(self, texts: list[str], /) -> torch.Tensor:
        """Transform texts to (b, ...), each row depending on its text alone, without randomness."""
        ...


@runtime_checkable
class PixelTransform(Protocol):
    """A transform that also takes an image as an array, which costs less than Pillow's image."""

    def __call__(self, image: Image.Image, /) -> torch.Tensor:
        """Transform one image."""
        ...

    def pixels(self, pixels: np.ndarray, /) -> torch.Tensor:
        """Transform an RGB image, uint8 (height, width, 3), as `__call__` does."""
        ...


@dataclass(frozen=True)
class EncodedImage:
    """The arguments of `decode_image` for an image file that is to be decoded later."""

    data: bytes
    key: str

    def decode(self) -> Image.Image:
        """Decode the image; raises BadSample if that fails."""
        return decode_image(self.data, self.key)

    def pixels(self) -> np.ndarray | None:
        """The pixels of a colour JPEG file, uint8 (height, width, 3); None for any other file.

        They are Pillow's: both libraries have libjpeg-turbo, and a file with a fault of any kind
        is left to Pillow, which accepts some. Pillow takes a tenth longer, and its image is copied
        twice to become an array.
        """
        try:
            if simplejpeg.decode_jpeg_header(self.data)[2] != "YCbCr":
                return None
            return simplejpeg.decode_jpeg(self.data, "RGB", strict=True)
        except ValueError:
            return None


class UndecodedPairs:
    """A data set of pairs with an `EncodedImage` instead of each image decoded from a file."""

    def __init__(self, dataset: PairDataset) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Pair:
        with undecoded():
            return self.dataset[index]


def transformed(
    image: Image.Image | EncodedImage, transform: Callable[[Any], torch.Tensor]
) -> torch.Tensor:
    """Transform an image, decoded first if need be; raises BadSample if that fails."""
    if not isinstance(image, EncodedImage):
        return transform(image)
    from_array = getattr(transform, "pixels", None)  # isinstance(..., PixelTransform) takes 20 us
    if from_array is None or (pixels := image.pixels()) is None:
        return transform(image.decode())
    return from_array(pixels)


_undecoded: ContextVar[bool] = ContextVar("undecoded", default=False)


@contextmanager
def undecoded() -> Iterator[None]:
    """Within this context `decode_image` returns an `EncodedImage`."""
    token = _undecoded.set(True)
    try:
        yield
    finally:
        _undecoded.reset(token)


def decode_image(data: bytes, key: str) -> Image.Image:
    """Decode an image file that is in memory; raises BadSample if that fails.

    Grey images of 16 bits are scaled to 8. Within `undecoded`, the result is an `EncodedImage` if
    the file begins like an image.
    """
    if _undecoded.get():
        _check_beginning(data, key)
        return EncodedImage(data, key)  # type: ignore[return-value]
    try:
        image = Image.open(io.BytesIO(data))
        image.load()
    except Exception as error:
        raise _bad_image(error, key) from error
    if image.mode.startswith("I;16"):  # which convert() would clip at 255: white
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    return image


def _bad_image(error: Exception, key: str) -> BadSample:
    """On damaged files Pillow's readers raise nearly every kind of exception: all mean the same."""
    if isinstance(error, Image.DecompressionBombError):
        limit = 2 * (Image.MAX_IMAGE_PIXELS or 0)
        return BadSample(f"image of more than {limit:,} pixels, Pillow's limit", key)
    return BadSample("undecodable image", key)


def _check_beginning(data: bytes, key: str) -> None:
    """Read the header with format, size and mode: most files that are not images fail here."""
    try:
        Image.open(io.BytesIO(data)).close()
    except Exception as error:
        raise _bad_image(error, key) from error


def clean_caption(caption: Any, key: str, what: str = "caption") -> str:
    """Return the caption, stripped; raises BadSample if nothing is left."""
    if caption is not None and not isinstance(caption, str):
        raise BadSample(f"{what} is not text", key)
    stripped = (caption or "").strip()
    if not stripped:
        raise BadSample(f"empty {what}", key)
    return stripped
