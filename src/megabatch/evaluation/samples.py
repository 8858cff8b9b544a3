"""Samples to evaluate on: an image with what is known of it, by index."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from PIL import Image

from megabatch.data.pairs import PairDataset, clean_caption

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

Captions = list[str]


@dataclass(frozen=True)
class Sample(Generic[T]):
    """One image (of a pair of texts: the first); `target`: its class or its captions.

    `key` names it in messages.
    """

    image: Any
    target: T
    key: str


class Samples(Protocol[T_co]):
    """Samples by index, as `megabatch.data.PairDataset` has pairs.

    A source may also have `damage: list[str]`, a line for each file read only in part, and
    `notes: list[str]`, what else a user should know before it is used.
    """

    def __len__(self) -> int:
        """Number of samples, bad ones included."""
        ...

    def __getitem__(self, index: int, /) -> Sample[Any]:
        """Sample `index`; raises `megabatch.data.BadSample` if it cannot be used."""
        ...


@dataclass(frozen=True)
class CaptionedPairs:
    """Pairs as samples; each line of a caption is a caption."""

    pairs: PairDataset

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> Sample[Captions]:
        pair = self.pairs[index]
        return Sample(pair.image, clean_captions(pair.caption, pair.key), pair.key)

    @property
    def first(self) -> str:
        """What the first of a pair is, "image" or "text"."""
        return str(getattr(self.pairs, "first", "image"))

    @property
    def damage(self) -> list[str]:
        """What of the pairs' files could not be read."""
        return list(getattr(self.pairs, "damage", []))

    @property
    def notes(self) -> list[str]:
        """What else a user should know of the pairs."""
        return list(getattr(self.pairs, "notes", []))


class OneAfterAnother:
    """Several sources' samples as one's."""

    def __init__(self, sources: Sequence[Samples[Any]]) -> None:
        self.sources = sources
        self.damage = [line for source in sources for line in getattr(source, "damage", [])]
        self.notes = [line for source in sources for line in getattr(source, "notes", [])]
        self._ends = list(itertools.accumulate(len(source) for source in sources))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Sample[Any]:
        number = bisect.bisect_right(self._ends, index)
        return self.sources[number][index - (self._ends[number - 1] if number else 0)]


@dataclass(frozen=True)
class ImageList:
    """Pictures in memory; the target of each is its place."""

    images: Sequence[Image.Image]

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Sample[int]:
        return Sample(self.images[index], index, str(index))


def _is_empty(caption: Any) -> bool:
    return caption is None or (isinstance(caption, str) and not caption.strip())


def is_short(captions: Sequence[Any]) -> bool:
    """Whether some captions are empty, but not all: `clean_captions` then gives the others."""
    empty = [_is_empty(caption) for caption in captions]
    return any(empty) and not all(empty)


def clean_captions(value: Any, key: str) -> Captions:
    """A text's lines, or a list's texts, without white space around them and empty ones.

    Raises:
        BadSample: nothing is left, or something is no text.
    """
    if not isinstance(value, (list, tuple)):
        value = clean_caption(value, key).splitlines()
    kept = [clean_caption(v, key) for v in value if not _is_empty(v)]
    return kept or [clean_caption("", key)]
