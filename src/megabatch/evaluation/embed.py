"""Features of many images and texts, batch by batch."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from megabatch.data.pairs import BadSample
from megabatch.errors import OutOfMemory, UsageError, plural
from megabatch.evaluation.samples import Samples
from megabatch.evaluation.table import left_out
from megabatch.models import Towers
from megabatch.models.padding import trimmed
from megabatch.models.towers import Tower
from megabatch.ranks import all_gather_rows, all_gather_values, local_range

_DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class Embedded:
    """The image features of a source, with the samples' targets and indices.

    features: (n, d); targets, indices: n each, without the bad samples; bad: the reason and the key
    of each of those.
    """

    features: Tensor
    targets: list[Any]
    indices: list[int]
    bad: list[tuple[str, str]] = field(default_factory=list)

    def left_out(self, prefix: str = "") -> dict[str, dict[str, Any]]:
        """The bad samples' entries in `evaluation.json`: by reason their number and first key."""
        return {
            f"{prefix}skipped": dict(Counter(reason for reason, _ in self.bad)),
            f"{prefix}skipped_first": dict(reversed(self.bad)),
        }


@dataclass
class Encoder:
    """Towers with the device, precision and batch size of their evaluation.

    Features are returned in float32 on that device, normalised; UsageError if they are not finite,
    OutOfMemory if the batches are too large.
    Each rank of `group` encodes a part of the batches, and gets all features.

    workers: worker processes that read and transform images; 0: this process does. report: called
    with a message on this rank's progress after each batch of images or texts. images, seconds:
    the number of images that all ranks have embedded, and the time taken, reading included.
    """

    towers: Towers
    device: str = "cpu"
    precision: str = "fp32"
    batch_size: int = 512
    workers: int = 0
    group: object = "local"
    report: Callable[[str], None] = lambda words: None
    images: int = 0
    seconds: float = 0.0

    def embed(self, samples: Samples[Any], title: str) -> Embedded:
        """Embed each image once; bad samples are skipped and listed.

        `title`: of the samples, for messages.

        Raises:
            UsageError: none of them is usable.
        """
        started = time.perf_counter()
        # Whole batches, so that each has the same samples on any number of ranks.
        mine = local_range(len(samples), self.group, block=self.batch_size)
        loader = DataLoader(
            _Transformed(samples, self.towers.eval_transform),
            batch_size=self.batch_size,
            sampler=mine,
            num_workers=self.workers,
            collate_fn=_collated,
            pin_memory=torch.device(self.device).type == "cuda",
        )
        targets: list[Any] = []
        indices: list[int] = []
        bad: list[tuple[str, str]] = []

        def images() -> Iterable[Tensor]:
            for batch in loader:
                targets.extend(batch["targets"])
                indices.extend(batch["indices"])
                bad.extend(batch["bad"])
                self.report(f"{title}: {len(indices) + len(bad):,} of {len(mine):,} images")
                if batch["images"]:
                    yield batch["images"][0]

        features = self._features(images(), "image")
        self.images += len(features)
        self.seconds += time.perf_counter() - started
        parts = all_gather_values([targets, indices, bad], self.group)
        by_kind = zip(*parts, strict=True)
        targets, indices, bad = ([one for part in of_kind for one in part] for of_kind in by_kind)
        found = Embedded(features, targets, indices, [(reason, key) for reason, key in bad])
        if not targets:
            why = "; ".join(left_out(found.left_out()))
            raise UsageError(f"{title}: none of {plural(len(bad), 'sample')} is usable: {why}")
        return found

    def texts(self, texts: Iterable[str]) -> Tensor:
        """Features (n, d) of texts."""
        texts = list(texts)
        mine = local_range(len(texts), self.group, block=self.batch_size)

        def batches() -> Iterable[Tensor]:
            for start in mine[:: self.batch_size]:
                end = min(mine.stop, start + self.batch_size)
                yield self.towers.tokenizer(texts[start:end])
                self.report(f"{end - mine.start:,} of {len(mine):,} texts")

        return self._features(batches(), "text")

    @torch.no_grad()
    def _features(self, batches: Iterable[Tensor], tower: Tower) -> Tensor:
        module = cast(Any, self.towers.module.eval())
        encode = module.encode_image if tower == "image" else module.encode_text
        lengths, dtype = self.towers.lengths.get(tower), _DTYPES[self.precision]
        parts = [torch.zeros(0, self.towers.embed_dim, device=self.device)]
        for batch in batches:
            if lengths is not None:
                batch = trimmed(batch, lengths)
            kind = torch.device(self.device).type
            autocast = torch.autocast(kind, dtype) if dtype else nullcontext()
            with torch.inference_mode(), autocast:
                try:
                    part = encode(batch.to(self.device, non_blocking=True))
                except torch.OutOfMemoryError as error:
                    raise OutOfMemory(
                        f"out of memory on {self.device} with --batch-size {self.batch_size}; "
                        "expected less"
                    ) from error
                # Not by the encoder: a norm in bf16 has 3 digits, and lengths differed by 0.3%.
                parts.append(F.normalize(part.float(), dim=-1))
        features = all_gather_rows(torch.cat(parts), self.group)
        if not bool(features.isfinite().all()):
            why = "fp16 overflows" if self.precision == "fp16" else "its weights have diverged"
            raise UsageError(f"the model's features are not finite: {why}")
        return features


@dataclass(frozen=True)
class _Transformed(Dataset[tuple[Any, ...]]):
    """(image, target, index) of each sample; of a bad one its reason and key."""

    samples: Samples[Any]
    transform: Callable[[Image.Image], Tensor]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        try:
            sample = self.samples[index]
        except BadSample as bad:
            return bad.reason, bad.key
        return self.transform(sample.image), sample.target, index


def _collated(items: list[tuple[Any, ...]]) -> dict[str, Any]:
    """A batch as a worker returns it; `images`: one tensor, none if all samples are bad."""
    good = [item for item in items if len(item) == 3]
    return {
        "images": [torch.stack([image for image, *_ in good])] if good else [],
        "targets": [target for _, target, _ in good],
        "indices": [index for *_, index in good],
        "bad": [item for item in items if len(item) == 2],
    }
