"""Features of many images and texts, batch by batch."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from megabatch.data.images import transformed
from megabatch.data.pairs import BadSample
from megabatch.errors import OutOfMemory, UsageError, plural
from megabatch.evaluation.samples import Samples
from megabatch.evaluation.table import left_out
from megabatch.evaluation.tokens import Features, Tokens
from megabatch.gradient_cache.batches import mapped, to_device
from megabatch.models import Towers
from megabatch.models.padding import counted, trimmed
from megabatch.models.towers import Tower
from megabatch.ranks import all_gather_rows, all_gather_values, local_range

_DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class Embedded:
    """The image features of a source, with the samples' targets and indices.

    features: of n images; targets, indices: n each, without the bad samples; bad: the reason and
    the key of each of those.
    """

    features: Features
    targets: list[Any]
    indices: list[int]
    bad: list[tuple[str, str]] = field(default_factory=list)

    def left_out(self) -> dict[str, dict[str, Any]]:
        """The bad samples' entries in `evaluation.json`: by reason their number and first key."""
        return {
            "skipped": dict(Counter(reason for reason, _ in self.bad)),
            "skipped_first": dict(reversed(self.bad)),
        }


@dataclass
class Encoder:
    """Towers with the device, precision and batch size of their evaluation.

    Features are returned in float32 on that device, normalised; UsageError if they are not finite,
    OutOfMemory if the batches are too large. Those of a model with a feature for each token are
    `Tokens`, in the encoders' precision, as there are many.
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
    report: Callable[[str], None] = lambda words: None

    def embed(self, samples: Samples, title: str) -> Embedded:
        """Embed each image once; bad samples are skipped and listed.

        `title`: of the samples, for messages.

        Raises:
            UsageError: none of them is usable.
        """
        # Whole batches, so that each has the same samples on any number of ranks.
        mine = local_range(len(samples), self.group, block=self.batch_size)
        loader = DataLoader(
            _Transformed(samples, self.towers.eval_transform),
            batch_size=self.batch_size,
            sampler=mine,
            num_workers=self.workers,
            collate_fn=functools.partial(
                _collated, getattr(self.towers.eval_transform, "collate", torch.stack)
            ),
            pin_memory=torch.device(self.device).type == "cuda",
        )
        records: list[Any] = []

        def images() -> Iterable[Any]:
            for batch, some in loader:
                records.extend(some)
                self.report(f"{title}: {len(records):,} of {len(mine):,} images")
                if batch is not None:
                    yield batch

        features = self._features(images(), "image")
        gathered = all_gather_values(records, self.group)
        good: list[tuple[int, Any]] = []
        bad: list[tuple[str, str]] = []
        for first, second in (record for of_rank in gathered for record in of_rank):
            (good if isinstance(first, int) else bad).append((first, second))
        found = Embedded(features, [target for _, target in good], [i for i, _ in good], bad)
        if not good:
            why = "; ".join(left_out(found.left_out()))
            raise UsageError(f"{title}: none of {plural(len(bad), 'sample')} is usable: {why}")
        return found

    def texts(self, texts: Iterable[str]) -> Features:
        """Features of texts."""
        texts = list(texts)
        mine = local_range(len(texts), self.group, block=self.batch_size)

        def batches() -> Iterable[Tensor]:
            for start in mine[:: self.batch_size]:
                end = min(mine.stop, start + self.batch_size)
                yield self.towers.tokenizer(texts[start:end])
                self.report(f"{end - mine.start:,} of {len(mine):,} texts")

        return self._features(batches(), "text")

    @torch.no_grad()
    def _features(self, batches: Iterable[Any], tower: Tower) -> Features:
        module = cast(Any, self.towers.module.eval())
        encode = module.encode_image if tower == "image" else module.encode_text
        lengths, dtype = self.towers.lengths.get(tower), _DTYPES[self.precision]
        multi_vector = self.towers.multi_vector
        kept = dtype if multi_vector and dtype else torch.float32
        parts = [torch.zeros(0, self.towers.embed_dim, dtype=kept, device=self.device)]
        counts = [torch.zeros(0, dtype=torch.int64, device=self.device)]
        move = functools.partial(to_device, device=torch.device(self.device))
        for batch in batches:
            if lengths is not None:
                batch = trimmed(batch, lengths)
            kind = torch.device(self.device).type
            autocast = torch.autocast(kind, dtype, enabled=dtype is not None)
            with torch.inference_mode(), autocast:
                try:
                    part = encode(mapped(batch, move))
                except torch.OutOfMemoryError as error:
                    raise OutOfMemory(
                        f"out of memory on {self.device} with --batch-size {self.batch_size}; "
                        "expected less"
                    ) from error
                if multi_vector:
                    mask = counted(part)
                    part = part[mask]
                    counts.append(mask.sum(1))
                # Not by the encoder: a norm in bf16 has 3 digits, and lengths differed by 0.3%.
                parts.append(F.normalize(part.float(), dim=-1).to(kept))
        features = all_gather_rows(torch.cat(parts), self.group)
        if not bool(features.isfinite().all()):
            why = "fp16 overflows" if self.precision == "fp16" else "its weights have diverged"
            raise UsageError(f"the model's features are not finite: {why}")
        if not multi_vector:
            return features
        return Tokens(features, all_gather_rows(torch.cat(counts), self.group))


@dataclass(frozen=True)
class _Transformed(Dataset[tuple[Any, ...]]):
    """Each sample's image, index and target; of a bad one None, the reason and its key."""

    samples: Samples
    transform: Callable[[Any], Any]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        try:
            sample = self.samples[index]
            return transformed(self.transform, sample.image), index, sample.target
        except BadSample as bad:
            return None, bad.reason, bad.key


def _collated(
    collate: Callable[[list[Any]], Any], items: list[tuple[Any, ...]]
) -> tuple[Any, list[tuple[Any, ...]]]:
    """The usable images as one batch, None without any; and what else there is of each sample."""
    images = [image for image, *_ in items if image is not None]
    return collate(images) if images else None, [(first, second) for _, first, second in items]
