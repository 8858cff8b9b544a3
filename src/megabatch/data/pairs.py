"""The interface of a source of pairs, and decoding of images."""

from __future__ import annotations

import hashlib
import io
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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

    An image from a file is an EncodedImage: who uses it decodes it, now or later (see `decoded`).
    In a pair of texts `image` is the first text, such as the query to a passage.
    `id`, 0 <= id < 2**62: pairs with equal ids are not negatives of each other. None: pairs with
    equal captions are not.
    `negatives`: hard negatives, texts that look right but are not, if the source has any.
    """

    image: Image.Image | EncodedImage | str
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
        """Sample `index`; raises BadSample if it cannot be used, as may decoding its image."""
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


@dataclass(frozen=True)
class EncodedImage:
    """An image file in memory; `key` names the sample."""

    data: bytes
    key: str

    def decode(self) -> Image.Image:
        """Decode the image, grey ones of 16 bits scaled to 8; raises BadSample if that fails."""
        with self._damage():
            image = Image.open(io.BytesIO(self.data))
            image.load()
        if image.mode.startswith("I;16"):  # which convert() would clip at 255: white
            return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
        return image

    def check(self) -> None:
        """Read the header with format, size and mode; BadSample for most files with no image."""
        with self._damage():
            Image.open(io.BytesIO(self.data)).close()

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

    @contextmanager
    def _damage(self) -> Iterator[None]:
        """On damaged files Pillow raises nearly every kind of exception: all mean the same."""
        try:
            yield
        except Image.DecompressionBombError as error:
            limit = 2 * (Image.MAX_IMAGE_PIXELS or 0)
            reason = f"image of more than {limit:,} pixels, Pillow's limit"
            raise BadSample(reason, self.key) from error
        except Exception as error:
            raise BadSample("undecodable image", self.key) from error


@dataclass(frozen=True)
class DeferredImage:
    """An image to be decoded later, and the seed of its augmentation.

    image: a file, or an image from a source without files.
    """

    image: EncodedImage | Image.Image
    seed: int

    @classmethod
    def keep(cls, image: EncodedImage | Image.Image) -> DeferredImage:
        """Replace a transform: keep the image, and the seed that the transform would have had."""
        if isinstance(image, EncodedImage):
            image.check()
        return cls(image, torch.initial_seed())

    @property
    def nbytes(self) -> int:
        """Bytes of the file, or of the pixels."""
        if isinstance(self.image, EncodedImage):
            return len(self.image.data)
        return self.image.width * self.image.height * len(self.image.getbands())


def decoded(image: Any) -> Any:
    """An image or text as it is, an EncodedImage decoded; raises BadSample if that fails."""
    return image.decode() if isinstance(image, EncodedImage) else image


def transformed(transform: Callable[[Any], torch.Tensor], image: Any) -> torch.Tensor:
    """Transform an image or text; an EncodedImage is decoded; raises BadSample if that fails.

    A transform's method `pixels`, if it has one, gets colour JPEG files as arrays (see
    `EncodedImage.pixels`), which costs less than Pillow's image.
    """
    from_array = getattr(transform, "pixels", None)
    if from_array is None or not isinstance(image, EncodedImage):
        return transform(decoded(image))
    pixels = image.pixels()
    return transform(image.decode()) if pixels is None else from_array(pixels)


def decode_image(data: bytes, key: str) -> Image.Image:
    """Decode an image file; raises BadSample if that fails."""
    return EncodedImage(data, key).decode()


def clean_caption(caption: Any, key: str, what: str = "caption") -> str:
    """Return the caption, stripped; raises BadSample if nothing is left."""
    if caption is not None and not isinstance(caption, str):
        raise BadSample(f"{what} is not text", key)
    stripped = (caption or "").strip()
    if not stripped:
        raise BadSample(f"empty {what}", key)
    return stripped
