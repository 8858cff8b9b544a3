"""Whole optimizer steps with a million pairs: time by part, memory, the loss before and after.

    python benchmarks/draw_icons.py --output icons --size 32 --workers 16
    torchrun --nproc-per-node 2 benchmarks/million.py --icons icons

An open_clip model is trained on real drawings, the icons of npm's @iconify/json with their
captions, each as often as the batch needs: every time in another size, place and colours
(machinery/drawn_icons.py). Equal captions, and so the repeats of an icon, share an id and are
positives of each other. The batch lies on the host. All steps take the same batch, so the loss of
each is that after the step before. Nothing is extrapolated: every pair goes through both towers in
every step, and the loss compares all of them. In the first step kernels are compiled, after the
second the activations that fit are known; the last step is the one to read.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from machinery import drawn_icons
from machinery.parts import Parts
from megabatch import files
from megabatch.benchmarking.records import command_line, environment
from megabatch.config.settings import TrainConfig
from megabatch.data import Batch, PairLoader, open_pairs
from megabatch.models import Towers
from megabatch.training.trainer import Trainer
from megabatch.training.world import World, joined


def main(arguments: Sequence[str] | None = None) -> None:
    options = _options(arguments)
    with joined(TrainConfig(device=options.device)) as world:
        if world.device.type == "cuda":  # as OpenCLIP's trainer sets them
            torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
            torch.backends.cudnn.benchmark = True
        began = time.perf_counter()
        config = configuration(options)
        torch.manual_seed(config.seed)
        towers = drawn_icons.towers(options.model, options.size)
        batch, data = first_batch(options, towers, world)
        trainer = Trainer(config, towers.module, world.device, options.steps, world, towers.lengths)
        content = {
            "command": command_line(options.output),
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            **environment(),
            "data": {**data, "seconds": round(time.perf_counter() - began, 1)},
            "records": [],
        }
        for number in range(1, options.steps + 1):
            record = step(trainer, batch, number)
            content["records"].append(record)
            if world.main:
                files.write_text(options.output, json.dumps(content, indent=1) + "\n")
                print(shown(record), flush=True)
                print(*trainer.news, sep="\n", flush=True)
                trainer.news.clear()


def configuration(options: argparse.Namespace) -> TrainConfig:
    """The trainer's settings; the others are its defaults."""
    return TrainConfig(
        model=options.model,
        loss=options.loss,
        duplicates="positives",
        global_batch_size=options.batch_size,
        micro_batch_size=options.micro_batch_size,
        steps=options.steps,
        lr=options.lr,
        warmup=0,
        precision=options.precision,
        device=options.device,
        torchcompile=options.compile,
    )


def first_batch(
    options: argparse.Namespace, towers: Towers, world: World
) -> tuple[Batch, dict[str, Any]]:
    """This rank's rows of the first batch, and facts about the data set."""
    icons = str(options.icons / "train")
    pairs = len(open_pairs(icons))
    repeats = max(1.0, options.batch_size / pairs * (1 + 1e-9))
    loader = PairLoader(
        open_pairs(icons, upsampling_factors=[repeats]),
        batch_size=options.batch_size,
        transform=towers.train_transform,
        tokenizer=towers.tokenizer,
        seed=0,
        rank=world.rank,
        world_size=world.size,
        pinned=world.device.type == "cuda",
    )
    batch = next(iter(loader))
    assert batch.ids is not None
    # Of a rank's rows, which is all that it knows.
    facts = {"pairs": pairs, "repeats": repeats, "captions_on_a_rank": len(batch.ids.unique())}
    return batch, facts


def step(trainer: Trainer, batch: Batch, number: int) -> dict[str, Any]:
    """The record of a step."""
    on_gpu = trainer.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    with Parts(trainer) as parts:
        figures = trainer.train_step(batch)
    split = parts.seconds()  # waits for the device
    seconds = time.perf_counter() - began
    # During the first step the trainer resets the allocator's peak, to find out what fits.
    peak = torch.cuda.max_memory_allocated() if on_gpu and number > 1 else None
    return {
        "contender": "megabatch",
        "model": trainer.config.model,
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "n_devices": trainer.world.size,
        "dtype": trainer.config.precision,
        "b": trainer.config.global_batch_size,
        "lr": trainer.config.lr,
        "step": number,
        "status": "ok",
        "micro_batch_size": trainer.micro_batch.rows,
        "kept_micro_batches": trainer.kept.count or 0,
        "loss_before": figures["loss"],
        "seconds": seconds,
        "pairs_a_second": trainer.config.global_batch_size / seconds,
        "parts": split,
        "peak_bytes": peak,
    }


def shown(record: dict[str, Any]) -> str:
    """A record in one line."""
    peak = record["peak_bytes"]
    return (
        f"step {record['step']}, {record['b']:,} pairs of {record['model']} on "
        f"{record['n_devices']}: loss {record['loss_before']:.4f} before, "
        f"{record['seconds']:.1f} s, {record['pairs_a_second']:,.0f} pairs/s"
        + ("" if peak is None else f", {peak / 2**30:.1f} GiB a GPU")
    )


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    gpu = torch.cuda.is_available()
    parser.add_argument("--icons", type=Path, default=Path("icons"),
                        help="folder of grey icons")  # fmt: skip
    parser.add_argument("--size", type=int, default=32, help="of the icons, in pixels")
    parser.add_argument("--model", default="ViT-B-32", help="one of open_clip")
    parser.add_argument("--loss", choices=("clip", "siglip"), default="clip")
    parser.add_argument("--batch-size", type=int, default=2**20, help="pairs of all GPUs")
    parser.add_argument("--micro-batch-size", type=int, default=2048, help="rows at a time, a GPU")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--precision", choices=("bf16", "fp32"), default="bf16" if gpu else "fp32")
    parser.add_argument("--device", default="cuda" if gpu else "cpu")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=gpu)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/million.json"))
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
