"""The interface of a source of pairs, and of an image file in it."""

from __future__ import annotations

import hashlib
import io
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import numpy as np
import simplejpeg
from PIL import Image

from megabatch.errors import UsageError, plural


class BadSample(Exception):
    """A sample that cannot be used; it is skipped and counted.

    `reason` is short and the same for all samples with the same fault; `key` names the sample.
    """

    def __init__(self, reason: str, key: str) -> None:
        super().__init__(reason, key)
        self.reason = reason
        self.key = key

    def __str__(self) -> str:
        return f"{self.reason}: {self.key}"


@dataclass(frozen=True)
class EncodedImage:
    """An image file in memory; `key` names the sample."""

    data: bytes
    key: str

    def decode(self) -> Image.Image:
        """Decode the image, grey ones of 16 bits scaled to 8; raises BadSample if that fails."""
        try:
            image = Image.open(io.BytesIO(self.data))
            image.load()
        except Image.DecompressionBombError as error:
            limit = 2 * (Image.MAX_IMAGE_PIXELS or 0)
            reason = f"image of more than {limit:,} pixels, Pillow's limit"
            raise BadSample(reason, self.key) from error
        except Exception as error:  # on damaged files Pillow raises nearly every kind
            raise BadSample("undecodable image", self.key) from error
        if image.mode.startswith("I;16"):  # which convert() would clip at 255: white
            return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
        return image

    def pixels(self) -> np.ndarray | None:
        """The pixels of a colour JPEG file, uint8 (height, width, 3); None for any other file.

        They are Pillow's: both libraries have libjpeg-turbo, and a file with a fault of any kind
        is left to Pillow, which accepts some. Pillow takes longer, and its image is copied twice.
        """
        try:
            if simplejpeg.decode_jpeg_header(self.data)[2] != "YCbCr":
                return None
            return simplejpeg.decode_jpeg(self.data, "RGB", strict=True)
        except ValueError:
            return None


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


@runtime_checkable
class PairDataset(Protocol):
    """Pairs by index.

    Every source is indexed once and then read at random: that gives an exact permutation in each
    epoch and exact resuming. A stream with a shuffle buffer is only roughly shuffled, cannot be
    resumed without reading everything again, and repeats samples if shards are uneven.

    A source may also have `damage: list[str]`, a line for each part of its files that cannot be
    read; `first`, "text" if its pairs are of two texts (the default is "image"); `parts`, if an
    epoch is not each of its samples once (see `megabatch.data.order.Part`); and `batches`, if each
    is to be of one part, with `names` of the parts (see `megabatch.data.order.MixedPairs`).

    A source of small images of one size, none of them bad, may give many at once, which is many
    times faster: `arrays(indices)`, uint8 (b, channels, height, width), and `texts(indices)`, their
    captions. The transform then needs `batch(images, seeds)`, whose randomness must come from
    `seeds`, int64 (b,), one for each image.
    """

    def __len__(self) -> int:
        """Number of samples, bad ones included."""
        ...

    def __getitem__(self, index: int, /) -> Pair:
        """Sample `index`; raises BadSample if it cannot be used, as may decoding its image."""
        ...


class PrefixedPairs:
    """A source whose texts get a prefix: first texts `query`, captions and negatives `caption`.

    A pair's id is that of its caption without the prefix: the same passage is the same passage,
    whatever the instruction that a source puts before it.
    """

    def __init__(self, pairs: Any, query: str, caption: str) -> None:
        self.pairs, self.query, self.caption = pairs, query, caption
        self.first: str = getattr(pairs, "first", "image")
        self.damage: list[str] = getattr(pairs, "damage", [])

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> Pair:
        pair: Pair = self.pairs[index]
        return replace(
            pair,
            image=self.query + pair.image if isinstance(pair.image, str) else pair.image,
            caption=self.caption + pair.caption,
            id=caption_id(pair.caption) if pair.id is None else pair.id,
            negatives=tuple(self.caption + text for text in pair.negatives),
        )


def check_usable(samples: Any, source: object) -> None:
    """Raise a UsageError if none of a hundred samples spread over a source can be used."""
    bad: list[BadSample] = []
    for index in np.unique(np.linspace(0, len(samples) - 1, 100).astype(int)).tolist():
        try:
            samples[index]
            return
        except BadSample as sample:
            bad.append(sample)
    tried = plural(len(bad), "sample")
    raise UsageError(f"{source}: none of {tried} tried can be used; the first: {bad[0]}")


def is_blank(text: Any) -> bool:
    """Whether it is no text at all, or nothing but white space."""
    return text is None or (isinstance(text, str) and not text.strip())


def clean_caption(caption: Any, key: str, what: str = "caption") -> str:
    """Return the caption, stripped; raises BadSample if nothing is left."""
    if is_blank(caption):
        raise BadSample(f"empty {what}", key)
    if not isinstance(caption, str):
        raise BadSample(f"{what} is not text", key)
    return caption.strip()
