"""The trainers that benchmarks/throughput.py compares, as functions that do one step."""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import open_clip
import torch
from open_clip_train.train import train_one_epoch
from torch import Tensor

from machinery.definitions import captions, tokenized
from megabatch.config.settings import TrainConfig, problems
from megabatch.data import Batch
from megabatch.data.collect import Memory
from megabatch.models import Towers, create
from megabatch.models.blocks import compile_blocks
from megabatch.models.openclip import accept_short_texts
from megabatch.models.padding import trimmed
from megabatch.training.trainer import Trainer
from megabatch.training.world import World

#: Steps change no weight beyond rounding, so that the losses of all of them are comparable.
LR = 1e-9
#: Different images on the host; a larger batch repeats them.
IMAGES = 4096


@dataclass(frozen=True)
class Pairs:
    """A rank's pairs on the host: images, uint8 (at most IMAGES, 3, s, s), tokens (n, context)."""

    images: Tensor
    tokens: Tensor

    def first(self, n: int) -> Pairs:
        """The first `n` of them."""
        return Pairs(self.images, self.tokens[:n])

    def bytes(self) -> Tensor:
        """Images uint8 (n, 3, s, s), pinned for a GPU, as the trainer's loader makes them."""
        memory = Memory(pinned=torch.cuda.is_available())
        images = memory.like(self.images, len(self.tokens))
        for start in range(0, len(images), len(self.images)):
            part = images[start : start + len(self.images)]
            part.copy_(self.images[: len(part)])
        return images


def make_pairs(towers: Towers, size: int, world: World) -> Pairs:
    """A rank's share of `size` pairs of random images and of definitions, the shortest first.

    So OpenCLIP's micro-batches can be cut as this trainer cuts its own, which it sorts anyway.
    """
    side = towers.module.visual.image_size  # type: ignore[union-attr]
    shape = tuple(side) if isinstance(side, (tuple, list)) else (side, side)
    share = size // world.size
    generator = torch.Generator().manual_seed(1 + world.rank)
    rows = min(share, IMAGES)
    images = torch.randint(256, (rows, 3, *shape), generator=generator, dtype=torch.uint8)
    tokens = tokenized(towers.tokenizer, captions(size)[world.rank * share :][:share])
    return Pairs(images, tokens[towers.lengths["text"](tokens).argsort(stable=True)])


class Megabatch:
    """Steps of this project's trainer; `settings`: those that differ from its defaults."""

    def __init__(self, model: str, size: int, world: World, settings: dict[str, Any]) -> None:
        settings = {"precision": "bf16", **settings}  # as the other contenders have, on CPUs too
        config = TrainConfig(model=model, global_batch_size=size, lr=LR, warmup=0, **settings)
        if reasons := problems(config):
            raise SystemExit(f"--set: {reasons}")
        torch.manual_seed(0)
        towers = create(model)
        self.towers = towers
        self.news: list[str] = []
        given = (config, towers.module, world.device, 1000, world, towers.lengths)
        self.trainer = Trainer(*given, tell=self.news.append)

    def prepare(self, pairs: Pairs) -> Callable[[], float]:
        """A function that does a step on these pairs and returns its loss."""
        n = len(pairs.tokens)
        batch = Batch(pairs.bytes(), pairs.tokens, torch.arange(n))
        return lambda: self.trainer.train_step(batch)["loss"]

    @property
    def micro_batch_size(self) -> int:
        """Rows that go through the towers at a time."""
        return self.trainer._step.micro_batch_size

    @property
    def kept(self) -> int:
        """Micro-batches of a step that are encoded once."""
        return self.trainer.division.kept


class OpenClip:
    """Steps of OpenCLIP's training loop, with accumulation if there are several micro-batches.

    `short`: a model that takes short texts, compiled in blocks, and texts cut as this trainer does.
    """

    kept = 0

    def __init__(
        self, model: str, micro: int, world: World, *, compiled: bool, short: bool
    ) -> None:
        torch.manual_seed(0)
        towers = create(model)
        self.towers = towers
        self.micro_batch_size = micro
        self._world = world
        self._images: Tensor | None = None
        module = open_clip.create_model(model, output_dict=True)
        module.load_state_dict(towers.module.state_dict())
        module = module.to(world.device)
        self._lengths = accept_short_texts(module) if short else None
        if short and compiled:
            compile_blocks(module, {"text"})
        if world.size > 1:
            on = [world.device] if world.device.type == "cuda" else None
            module = torch.nn.parallel.DistributedDataParallel(module, device_ids=on)
        decay = {True: 0.2, False: 0.0}  # as in open_clip_train.main: gains and biases have none
        groups = [
            {"params": [p for p in module.parameters() if (p.ndim > 1) == large], "weight_decay": d}
            for large, d in decay.items()
        ]
        self._optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.98), eps=1e-6)
        self._module = torch.compile(module) if compiled and not short else module
        self._loss = Recorded(
            open_clip.ClipLoss(
                local_loss=world.size > 1,
                gather_with_grad=world.size > 1,
                cache_labels=True,
                rank=world.rank,
                world_size=world.size,
            )
        )

    def prepare(self, pairs: Pairs) -> Callable[[], float]:
        """A function that does a step, an epoch of its own, and returns its loss."""
        micro, n = self.micro_batch_size, len(pairs.tokens)
        if n % micro or len(pairs.images) % micro:
            raise SystemExit(f"--micro-batch-sizes: {micro} does not divide {n} pairs a process")
        if self._images is None:
            self._images = self._normalized(pairs.images)
        images, texts = self._images, pairs.tokens.split(micro)
        if self._lengths is not None:
            texts = [trimmed(tokens, self._lengths) for tokens in texts]
        starts = range(0, n, micro)
        batches = Loader(
            [(images[i % len(images) :][:micro], t) for i, t in zip(starts, texts, strict=True)]
        )
        data = {"train": SimpleNamespace(set_epoch=lambda _: None, dataloader=batches)}
        arguments = Namespace(
            device=str(self._world.device), precision="amp_bf16", accum_freq=len(batches),
            distill=False, skip_scheduler=True, grad_clip_norm=None, horovod=False,
            batch_size=micro, world_size=self._world.size, rank=self._world.rank,
            log_every_n_steps=1 << 30, wandb=False, local_rank=self._world.rank,
        )  # fmt: skip

        def step() -> float:
            optimizer = self._optimizer
            train_one_epoch(
                self._module, data, self._loss, 0, optimizer, None, None, None, arguments
            )
            return self._world.mean(self._loss.first())

        return step

    def _normalized(self, images: Tensor) -> Tensor:
        """Float32 images, pinned on the host, as OpenCLIP's loader makes them."""
        visual: Any = self.towers.module.visual
        made: Tensor = visual.pixel_normalization(images)
        return made.pin_memory() if self._world.device.type == "cuda" else made


class Loader(list[Any]):
    """Micro-batches with the attributes of OpenCLIP's loaders."""

    def __init__(self, batches: Sequence[tuple[Tensor, Tensor]]) -> None:
        super().__init__(batches)
        self.num_batches = len(batches)
        self.num_samples = sum(len(texts) for _, texts in batches)


class Recorded(torch.nn.Module):
    """A loss that records the first of its values in a step; each one is of the whole batch."""

    def __init__(self, loss: torch.nn.Module) -> None:
        super().__init__()
        self._of_clip = loss
        self._value: Tensor | None = None

    def forward(self, **given: Any) -> Any:
        found = self._of_clip(**given)
        if self._value is None:
            self._value = found["contrastive_loss"].detach()
        return found

    def first(self) -> float:
        """The step's loss, which is then forgotten."""
        assert self._value is not None
        value, self._value = self._value.item(), None
        return value if math.isfinite(value) else math.inf
