"""Training steps of real towers: this trainer and OpenCLIP's own loop, on one device.

    python benchmarks/throughput.py --output benchmarks/results/throughput.json

Both train the same open_clip model from the same weights on the same pairs, which are in the host's
memory as data loaders provide them, with AdamW and bfloat16 autocast, in micro-batches: `megabatch`
by `Trainer.train_step`, `openclip` by `open_clip_train.train.train_one_epoch` with `accum_freq`,
its own gradient caching. The first step's loss must agree. `megabatch-on-device` has a
micro-batch's images on the device already: the difference is the cost of copying them.
"""

from __future__ import annotations

import argparse
import functools
import json
import platform
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import open_clip
import torch
from open_clip_train.train import train_one_epoch
from torch import Tensor

from megabatch.data import Batch
from megabatch.models import create
from megabatch.training import TrainConfig
from megabatch.training.trainer import Trainer

LR = 1e-5  # small, so that the cost of a step does not change with the weights


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default="ViT-B-32")
    parser.add_argument("--model-config", type=Path, help="one that open_clip does not bring")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[512, 4096, 32768])
    parser.add_argument("--micro-batch-size", type=int, default=512)
    parser.add_argument("--steps", type=int, default=3, help="that are timed, after one to warm up")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path)
    chosen = parser.parse_args()
    if chosen.model_config:
        open_clip.add_model_config(chosen.model_config)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    device = torch.device(chosen.device)
    record = {
        "command": "benchmarks/throughput.py",
        "device": torch.cuda.get_device_name() if device.type == "cuda" else platform.machine(),
        "versions": {"torch": torch.__version__, "open_clip": open_clip.__version__},
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "model": chosen.model,
        "micro_batch_size": chosen.micro_batch_size,
        "precision": "bf16",
        "records": [],
    }
    for size in chosen.batch_sizes:
        micro = min(size, chosen.micro_batch_size)
        for name, contender in CONTENDERS.items():
            found = measure(contender, chosen.model, size, micro, chosen.steps, device)
            record["records"].append({"contender": name, "b": size, **found})
            print(record["records"][-1], flush=True)
            if chosen.output:
                chosen.output.write_text(json.dumps(record, indent=1) + "\n")


def measure(
    contender: Callable[..., Iterator[float]],
    model: str,
    size: int,
    micro: int,
    steps: int,
    device: torch.device,
) -> dict[str, Any]:
    """Median seconds per step, pairs per second, peak memory, the first step's loss."""
    on_gpu = device.type == "cuda"
    torch.manual_seed(0)
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    losses, seconds = [], []
    began = time.perf_counter()
    try:
        for loss in contender(model, size, micro, steps + 1, device):
            if on_gpu:
                torch.cuda.synchronize()
            now = time.perf_counter()
            losses.append(loss)
            seconds.append(now - began)
            began = now
    except torch.OutOfMemoryError as error:
        return {"status": "out of memory", "note": str(error).split(".")[0]}
    step = sorted(seconds[1:])[len(seconds[1:]) // 2]
    return {
        "status": "ok",
        "seconds": round(step, 4),
        "all_seconds": [round(value, 4) for value in seconds[1:]],
        "pairs_a_second": round(size / step, 1),
        "peak_mib": round(torch.cuda.max_memory_allocated() / 2**20) if on_gpu else None,
        "first_loss": losses[0],
    }


class Repeated:
    """A batch's images on the host: `size` rows, the same ones in each micro-batch."""

    def __init__(self, rows: Tensor, size: int) -> None:
        self.rows, self.size = rows, size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, asked: slice) -> Tensor:
        start, stop, _ = asked.indices(self.size)
        return self.rows[: stop - start]


def pairs(module: Any, size: int, micro: int) -> tuple[Tensor, Tensor]:
    """Images (micro, 3, s, s) float32 and tokens (size, context), all texts different."""
    side = module.visual.image_size
    shape = tuple(side) if isinstance(side, (tuple, list)) else (side, side)
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(micro, 3, *shape, generator=generator)
    texts = torch.randint(
        1, module.vocab_size - 2, (size, module.context_length), generator=generator
    )
    texts[:, -1] = module.vocab_size - 1  # the end token, which the text tower looks for
    return images, texts


def megabatch_steps(
    model: str, size: int, micro: int, steps: int, device: torch.device, *, moved: bool = False
) -> Iterator[float]:
    """Losses of the trainer's steps; `moved`: images are on the device from the start."""
    config = TrainConfig(
        model=model, global_batch_size=size, micro_batch_size=micro, lr=LR, warmup=0
    )
    module = create(model).module
    images, texts = pairs(module, size, micro)
    images = images.to(device) if moved else images
    trainer = Trainer(config, module, device, steps)
    batch = Batch(Repeated(images, size), texts, torch.arange(size))  # type: ignore[arg-type]
    for _ in range(steps):
        yield trainer.train_step(batch)["loss"]


def openclip_steps(
    model: str, size: int, micro: int, steps: int, device: torch.device
) -> Iterator[float]:
    """Losses of OpenCLIP's epochs, of one step each."""
    if size % micro:
        raise SystemExit(f"--batch-sizes: {size} is no multiple of the micro-batch, {micro}")
    module = create(model).module.to(device)
    images, texts = pairs(module, size, micro)
    optimizer = torch.optim.AdamW(module.parameters(), lr=LR)
    batches = [(images, part) for part in texts.split(micro)]
    loss = Kept(open_clip.ClipLoss(cache_labels=True))
    args = Namespace(
        device=str(device), precision="amp_bf16", accum_freq=len(batches), distill=False,
        skip_scheduler=True, grad_clip_norm=None, horovod=False, batch_size=micro, world_size=1,
        rank=0, log_every_n_steps=1 << 30, wandb=False,
    )  # fmt: skip
    for step in range(steps):
        loader = Loader(batches, size)
        data = {"train": SimpleNamespace(set_epoch=lambda _: None, dataloader=loader)}
        train_one_epoch(module, data, loss, step, optimizer, None, None, None, args)
        yield loss.first()


CONTENDERS: dict[str, Callable[..., Iterator[float]]] = {
    "megabatch": megabatch_steps,
    "megabatch-on-device": functools.partial(megabatch_steps, moved=True),
    "openclip": openclip_steps,
}


class Loader(list[Any]):
    """Micro-batches with the attributes of OpenCLIP's loaders."""

    def __init__(self, batches: list[Any], samples: int) -> None:
        super().__init__(batches)
        self.num_batches, self.num_samples = len(batches), samples


class Kept(torch.nn.Module):
    """A loss that records its values in a step."""

    def __init__(self, loss: torch.nn.Module) -> None:
        super().__init__()
        self.loss = loss
        self.values: list[Tensor] = []

    def forward(self, **given: Any) -> Any:
        found = self.loss(**given)
        self.values.append(found["contrastive_loss"].detach())
        return found

    def first(self) -> float:
        """The step's loss, which each micro-batch computes for the whole batch."""
        values, self.values = self.values, []
        return values[0].item()


if __name__ == "__main__":
    main()
