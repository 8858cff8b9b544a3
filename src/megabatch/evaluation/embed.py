"""Features of many images and texts, a batch at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, TypeVar, cast

import torch
from PIL import Image
from torch import Tensor

from megabatch.data.pairs import BadSample, PairDataset
from megabatch.errors import UsageError
from megabatch.models import Towers

T = TypeVar("T")


@dataclass
class Encoder:
    """Towers with the device, precision and batch size that they are evaluated at.

    Features come back in float32 on the CPU, normalised; UsageError if they are not finite.
    """

    towers: Towers
    device: str = "cpu"
    precision: str = "fp32"
    batch_size: int = 512

    def images(self, images: Iterable[Image.Image]) -> Tensor:
        """Features (n, d) of pictures."""
        transform, module = self.towers.eval_transform, cast(Any, self.towers.module)
        return self._features(
            images, lambda batch: torch.stack([transform(i) for i in batch]), module.encode_image
        )

    def texts(self, texts: Iterable[str]) -> Tensor:
        """Features (n, d) of texts."""
        module = cast(Any, self.towers.module)
        return self._features(texts, self.towers.tokenizer, module.encode_text)

    @torch.inference_mode()
    def _features(
        self, items: Iterable[T], prepare: Callable[[list[T]], Tensor], encode: Callable[..., Any]
    ) -> Tensor:
        self.towers.module.eval()
        parts = [torch.zeros(0, self.towers.embed_dim)]
        for batch in _batches(items, self.batch_size):
            with self._autocast():
                features = encode(prepare(batch).to(self.device), normalize=True)
            parts.append(features.float().cpu())
        whole = torch.cat(parts)
        if not bool(whole.isfinite().all()):
            raise UsageError("the model's features are not finite: its weights have diverged")
        return whole

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.precision == "fp32":
            return nullcontext()
        return torch.autocast(torch.device(self.device).type, torch.bfloat16)


@dataclass
class EmbeddedPairs:
    """The image features of a data set, with the captions and places of the samples they are of.

    features: (n, d); captions, indices: n each, indices into the data set (bad samples are missing
    there); skipped: how many bad samples for each reason.
    """

    features: Tensor
    captions: list[str]
    indices: list[int]
    skipped: Counter[str] = field(default_factory=Counter)


def embed_images_of_pairs(encoder: Encoder, pairs: PairDataset) -> EmbeddedPairs:
    """Embed each image once; unusable samples are skipped and counted."""
    captions: list[str] = []
    indices: list[int] = []
    skipped: Counter[str] = Counter()

    def images() -> Iterator[Image.Image]:
        for index in range(len(pairs)):
            try:
                pair = pairs[index]
            except BadSample as bad:
                skipped[bad.reason] += 1
                continue
            captions.append(pair.caption)
            indices.append(index)
            yield pair.image

    features = encoder.images(images())
    return EmbeddedPairs(features, captions, indices, skipped)


def distinct_with_ids(captions: Sequence[str]) -> tuple[list[str], Tensor]:
    """Distinct captions in order of first use, and each caption's place among them, int64 (n,)."""
    place = {caption: i for i, caption in enumerate(dict.fromkeys(captions))}
    return list(place), torch.tensor([place[c] for c in captions], dtype=torch.int64)


def _batches(items: Iterable[T], size: int) -> Iterator[list[T]]:
    iterator = iter(items)
    while batch := list(islice(iterator, size)):
        yield batch
