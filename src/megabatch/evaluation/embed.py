"""Features of many images and texts, batch by batch."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from megabatch.data.pairs import BadSample
from megabatch.errors import OutOfMemory, UsageError
from megabatch.evaluation.samples import Samples
from megabatch.models import Towers
from megabatch.models.layers import Tower
from megabatch.models.padding import trimmed
from megabatch.ranks import all_gather_rows, all_gather_values, local_range

_DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class Embedded:
    """The image features of a source, with the samples' targets and indices.

    features: (n, d); targets, indices: n each, without the bad samples; skipped: the number of bad
    samples by reason; skipped_first: the first one's key by reason.
    """

    features: Tensor
    targets: list[Any]
    indices: list[int]
    skipped: Counter[str] = field(default_factory=Counter)
    skipped_first: dict[str, str] = field(default_factory=dict)

    def left_out(self, prefix: str = "") -> dict[str, dict[str, Any]]:
        """The bad samples' entries in `evaluation.json`; `prefix`: of the keys."""
        return {
            f"{prefix}skipped": dict(self.skipped),
            f"{prefix}skipped_first": dict(self.skipped_first),
        }

    def reasons(self) -> str:
        """A description of the bad samples."""
        return "; ".join(
            f"{count:,} × {reason} (first: {self.skipped_first[reason]})"
            for reason, count in self.skipped.most_common()
        )


@dataclass
class Pace:
    """Number of images that all ranks have embedded, and the time taken, reading included."""

    images: int = 0
    seconds: float = 0.0

    def add(self, images: int, seconds: float) -> None:
        """Add images and time."""
        self.images += images
        self.seconds += seconds

    @property
    def images_per_second(self) -> float:
        """The mean so far, 0 before the first image."""
        return self.images / self.seconds if self.seconds else 0.0


@dataclass
class Encoder:
    """Towers with the device, precision and batch size of their evaluation.

    Features are returned in float32 on that device, normalised; UsageError if they are not finite,
    OutOfMemory if the batches are too large.
    Each rank of `group` encodes a part of the batches, and gets all features.

    workers: worker processes that read and transform images; 0: this process does. report: called
        with a message on this rank's progress after each batch of images or texts.
    """

    towers: Towers
    device: str = "cpu"
    precision: str = "fp32"
    batch_size: int = 512
    workers: int = 0
    group: object = "local"
    pace: Pace = field(default_factory=Pace)
    report: Callable[[str], None] = lambda words: None

    def embed(self, samples: Samples[Any], title: str = "") -> Embedded:
        """Embed each image once; bad samples are skipped and counted.

        `title`: of the samples, for `report`.
        """
        batches = _Batches(samples, self.towers.eval_transform, self.batch_size)
        mine = local_range(len(batches), self.group)
        total = min(len(samples), mine.stop * self.batch_size) - mine.start * self.batch_size
        loader = DataLoader(
            batches,
            batch_size=None,  # an item is a batch already, of the same samples on any rank
            sampler=mine,
            num_workers=self.workers,
            pin_memory=torch.device(self.device).type == "cuda",
        )
        targets: list[Any] = []
        indices: list[int] = []
        skipped: Counter[str] = Counter()
        skipped_first: dict[str, str] = {}
        name = f"{title}: " if title else ""

        def images() -> Iterable[Tensor]:
            for batch in loader:
                targets.extend(batch.targets)
                indices.extend(batch.indices)
                skipped.update(batch.skipped)
                for reason, key in batch.skipped_first.items():
                    skipped_first.setdefault(reason, key)
                done = len(indices) + sum(skipped.values())
                self.report(f"{name}{done:,} of {total:,} images")
                if batch.images is not None:
                    yield batch.images

        started = time.perf_counter()
        features = self._features(images(), "image")
        self.pace.add(len(features), time.perf_counter() - started)
        parts = all_gather_values([targets, indices, skipped, skipped_first], self.group)
        return Embedded(
            features,
            [target for of_rank, *_ in parts for target in of_rank],
            [index for _, of_rank, *_ in parts for index in of_rank],
            sum((Counter(of_rank) for *_, of_rank, _ in parts), Counter()),
            {reason: key for *_, of_rank in reversed(parts) for reason, key in of_rank.items()},
        )

    def texts(self, texts: Iterable[str]) -> Tensor:
        """Features (n, d) of texts."""
        texts = list(texts)
        starts = range(0, len(texts), self.batch_size)
        mine = local_range(len(starts), self.group)

        def batches() -> Iterable[Tensor]:
            for number, i in enumerate(mine):
                yield self.towers.tokenizer(texts[starts[i] : starts[i] + self.batch_size])
                self.report(f"{number + 1:,} of {len(mine):,} batches of texts")

        return self._features(batches(), "text")

    @torch.no_grad()
    def _features(self, batches: Iterable[Tensor], tower: Tower) -> Tensor:
        module = cast(Any, self.towers.module.eval())
        encode = module.encode_image if tower == "image" else module.encode_text
        lengths = self.towers.lengths.get(tower)
        parts = [torch.zeros(0, self.towers.embed_dim, device=self.device)]
        for batch in batches:
            if lengths is not None:
                batch = trimmed(batch, lengths)
            with torch.inference_mode(), self._autocast():
                part = self._encoded(encode, batch)
                # Not by the encoder: a norm in bf16 has 3 digits, and lengths differed by 0.3%.
                parts.append(F.normalize(part.float(), dim=-1))
        features = all_gather_rows(torch.cat(parts), self.group)
        if not bool(features.isfinite().all()):
            why = "fp16 overflows" if self.precision == "fp16" else "its weights have diverged"
            raise UsageError(f"the model's features are not finite: {why}")
        return features

    def _encoded(self, encode: Callable[[Tensor], Tensor], batch: Tensor) -> Tensor:
        try:
            return encode(batch.to(self.device, non_blocking=True))
        except torch.OutOfMemoryError as error:
            raise OutOfMemory(
                f"out of memory on {self.device} with --batch-size {self.batch_size}; expected less"
            ) from error

    def _autocast(self) -> AbstractContextManager[Any]:
        dtype = _DTYPES[self.precision]
        if dtype is None:
            return nullcontext()
        return torch.autocast(torch.device(self.device).type, dtype)


class _Batch:
    """Samples as a worker returns them; `images` (b, ...), None if all of them are bad."""

    def __init__(self) -> None:
        self.images: Tensor | None = None
        self.targets: list[Any] = []
        self.indices: list[int] = []
        self.skipped: Counter[str] = Counter()
        self.skipped_first: dict[str, str] = {}

    def pin_memory(self) -> _Batch:
        """Called by the loader if the batch goes on to a GPU."""
        self.images = None if self.images is None else self.images.pin_memory()
        return self


@dataclass(frozen=True)
class _Batches(Dataset[_Batch]):
    samples: Samples[Any]
    transform: Callable[[Image.Image], Tensor]
    size: int

    def __len__(self) -> int:
        return -(-len(self.samples) // self.size)

    def __getitem__(self, number: int) -> _Batch:
        batch = _Batch()
        images = []
        first = number * self.size
        for index in range(first, min(first + self.size, len(self.samples))):
            try:
                sample = self.samples[index]
            except BadSample as bad:
                batch.skipped[bad.reason] += 1
                batch.skipped_first.setdefault(bad.reason, bad.key)
                continue
            images.append(self.transform(sample.image))
            batch.targets.append(sample.target)
            batch.indices.append(index)
        batch.images = torch.stack(images) if images else None
        return batch
