"""Images a second of the loader from JPEG shards, by number of workers; the trainer's wait.

    python benchmarks/data_rate.py --output benchmarks/results/data-rate.json
    python benchmarks/data_rate.py --workers 16 --model ViT-B-32 --batch-size 32768 --steps 6 \\
        --output benchmarks/results/data-rate-gpu.json

Cuts photographs (those that come with scikit-learn and matplotlib) at random into pictures of web
size, writes them as JPEG files into a shard, and measures: the time of each stage on one core;
images a second of a `PairLoader` with OpenCLIP's augmentation to 224 pixels, for each resize and
number of workers, once its first batches have come; with --model, a training run's share of time
spent waiting for data, after its first two steps. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import open_clip
import psutil
import torch
from PIL import Image
from webdataset.writer import TarWriter

from megabatch.benchmarking import records
from megabatch.data import PairLoader, open_pairs
from megabatch.data.fetch import stacked
from megabatch.data.pairs import EncodedImage
from megabatch.data.shards import ShardPairs
from megabatch.models.images import TorchResize, Transform, with_bytes
from megabatch.training import TrainConfig, train

SIDE = 224  # pixels of a model's images
FIRST_BATCHES = 3  # not counted: workers and memory are new
FIRST_STEPS = 2
RESIZES = ("pillow", "torch")


@dataclass(frozen=True)
class Record:
    """One measurement; `contender` is a resize or both, `kind` "stage", "loader" or "training"."""

    kind: str
    contender: str
    device: str
    n_devices: int
    dtype: str
    b: int | None
    stage: str = ""
    ms: float | None = None  #: of a stage for one image; of a training step
    workers: int | None = None
    images_per_second: float | None = None
    images_per_second_and_worker: float | None = None
    own_ms: float | None = None  #: CPU time of the loader's own process for one image
    worker_ms: float | None = None  #: and of the workers
    model: str = ""
    data_wait: float | None = None  #: share of the time, after the first steps
    data_waits: Sequence[float] = ()  #: of each step


def main() -> None:
    options = _options()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="megabatch-data-rate-") as scratch:
        folder = Path(scratch)
        shard = write_shard(folder, options.images, options.size)
        pairs = ShardPairs([shard])
        found = stages(pairs)
        for resize in options.resize:
            for workers in options.workers:
                found.append(rate(shard, resize, workers, options.seconds))
                print(found[-1], flush=True)
        if options.model:
            for resize in options.resize:
                found.append(training(shard, resize, folder / resize, options))
                print(found[-1], flush=True)
    records.write(options.output, records.command_line(options.output), found)


def photographs() -> list[Image.Image]:
    """The photographs that the installed libraries bring."""
    found = []
    try:
        from sklearn.datasets import load_sample_images

        found += [Image.fromarray(pixels) for pixels in load_sample_images().images]
    except ImportError:
        pass
    try:
        from matplotlib.cbook import get_sample_data

        found.append(Image.open(get_sample_data("grace_hopper.jpg")).convert("RGB"))
    except (ImportError, FileNotFoundError):
        pass
    if not found:
        raise SystemExit("no photographs: expected scikit-learn or matplotlib to be installed")
    return found


def write_shard(folder: Path, count: int, size: int) -> Path:
    """Write JPEG files of `size` x 3/4 `size` pixels, at qualities 85 and 90, with captions."""
    random = np.random.default_rng(0)
    sources = photographs()
    writer = TarWriter(str(folder / "00000.tar"), encoder=False, mtime=0)
    for number in range(count):
        source = sources[random.integers(len(sources))]
        width = min(source.width, source.height * 4 / 3) * random.uniform(0.5, 1)
        height = width * 3 / 4
        left = random.uniform(0, source.width - width)
        top = random.uniform(0, source.height - height)
        box = (left, top, left + width, top + height)
        picture = source.resize((size, size * 3 // 4), Image.Resampling.BICUBIC, box=box)
        file = io.BytesIO()
        picture.save(file, "jpeg", quality=int(random.choice([85, 90])))
        caption = f"a part of a photograph, number {number}, {round(width)} pixels wide"
        writer.write({"__key__": f"{number:06}", "jpg": file.getvalue(), "txt": caption.encode()})
    writer.close()
    return folder / "00000.tar"


def transforms() -> tuple[Transform, TorchResize]:
    """OpenCLIP's augmentation up to bytes, as the trainer has it, with each of RESIZES."""
    both = (open_clip.image_transform(SIDE, is_train=train) for train in (True, False))
    exact = with_bytes(torch.nn.Identity(), *both)[0]
    return exact, TorchResize(exact)


def stages(pairs: ShardPairs) -> list[Record]:
    """CPU time of each stage for one image, the least of three rounds over 128 of them."""
    numbers = range(min(128, len(pairs)))
    files = [pairs.read(i, "image") for i in numbers]
    images = [EncodedImage(file, "").decode() for file in files]
    encoded = [EncodedImage(file, "") for file in files]
    arrays = [pixels for file in encoded if (pixels := file.pixels()) is not None]
    exact, fast = transforms()
    rows = [exact(image) for image in images]
    tokenizer = open_clip.get_tokenizer("ViT-B-32")
    captions = [pairs.read(i, "txt").decode() for i in numbers]
    work: dict[tuple[str, str], tuple[Callable[[Any], object], Sequence[Any]]] = {
        ("both", "read"): (lambda i: pairs.read(i, "image"), numbers),
        ("pillow", "decode"): (lambda file: EncodedImage(file, "").decode(), files),
        ("torch", "decode"): (EncodedImage.pixels, encoded),
        ("pillow", "crop and resize"): (exact, images),
        ("torch", "crop and resize"): (fast.pixels, arrays),
        ("both", "tokenise"): (lambda caption: tokenizer([caption]), captions),
        ("both", "stack"): (lambda _: [stacked(rows[:64]) for _ in rows], [None]),
    }
    found = []
    for (contender, stage), (function, items) in work.items():
        ms = min(_cpu_seconds(function, items) for _ in range(3)) / len(numbers) * 1e3
        if stage == "stack":
            ms /= len(rows[:64])
        found.append(Record("stage", contender, "cpu", 1, "uint8", None, stage, round(ms, 4)))
        print(found[-1], flush=True)
    return found


def rate(shard: Path, resize: str, workers: int, seconds: float) -> Record:
    """Images a second of a loader that has been running for some batches."""
    size = 256 * workers  # four pieces of 64 images for each worker
    drawn = max(1.0, 100 * size / len(ShardPairs([shard])))  # an epoch ends after the measurement
    loader = PairLoader(
        open_pairs(str(shard), upsampling_factors=str(drawn)),
        batch_size=size,
        transform=transforms()[RESIZES.index(resize)],
        tokenizer=open_clip.get_tokenizer("ViT-B-32"),
        seed=0,
        workers=workers,
    )
    batches = iter(loader)
    for _ in range(FIRST_BATCHES):
        next(batches)
    (own, others), start, images = _processes_seconds(), time.perf_counter(), 0
    while time.perf_counter() - start < seconds or not images:
        images += len(next(batches))
    taken = time.perf_counter() - start
    own_after, others_after = _processes_seconds()
    return Record(
        "loader",
        resize,
        "cpu",
        1,
        "uint8",
        size,
        workers=workers,
        images_per_second=round(images / taken, 1),
        images_per_second_and_worker=round(images / taken / workers, 1),
        own_ms=round((own_after - own) / images * 1e3, 4),
        worker_ms=round((others_after - others) / images * 1e3, 4),
    )


def training(shard: Path, resize: str, output: Path, options: argparse.Namespace) -> Record:
    """A training run on these images: time of a step and the share of it spent waiting."""
    drawn = options.steps * options.batch_size / len(ShardPairs([shard]))
    config = TrainConfig(
        model=options.model,
        train_data=str(shard),
        train_data_upsampling_factors=str(drawn + 0.01),
        output=output,
        global_batch_size=options.batch_size,
        micro_batch_size=options.micro_batch_size,
        steps=options.steps,
        warmup=1,
        workers=max(options.workers),
        image_resize=resize,
        device=options.device,
        checkpoint_every=0,
    )
    if code := train(config):
        raise SystemExit(code)
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    waits = [line["data_wait"] for line in lines]
    seconds = [options.batch_size / line["pairs_per_second"] for line in lines]
    steady = slice(min(FIRST_STEPS, len(lines) - 1), None)
    waited = sum(t * wait for t, wait in zip(seconds[steady], waits[steady], strict=True))
    return Record(
        "training",
        resize,
        torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        1,
        config.precision,
        options.batch_size,
        ms=round(1e3 * sum(seconds[steady]) / len(seconds[steady]), 1),
        workers=config.workers,
        images_per_second=round(options.batch_size * len(seconds[steady]) / sum(seconds[steady])),
        model=options.model,
        data_wait=round(waited / sum(seconds[steady]), 4),
        data_waits=[round(wait, 4) for wait in waits],
    )


def _cpu_seconds(function: Callable[[Any], object], items: Sequence[Any]) -> float:
    start = time.process_time()
    for item in items:
        function(item)
    return time.process_time() - start


def _processes_seconds() -> tuple[float, float]:
    """CPU time so far of this process, and of its workers together."""
    own = psutil.Process()
    times = [process.cpu_times() for process in (own, *own.children())]
    first, *others = (float(t.user + t.system) for t in times)
    return first, sum(others)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cores = os.cpu_count() or 1
    usual = [workers for workers in (1, 2, 4, 8, 16) if workers <= cores]
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--images", type=int, default=1024, help="distinct images in the shard")
    parser.add_argument("--size", type=int, default=512, help="pixels of the longer side")
    parser.add_argument("--workers", type=int, nargs="+", default=usual)
    parser.add_argument("--resize", choices=RESIZES, nargs="+", default=list(RESIZES))
    parser.add_argument("--seconds", type=float, default=5.0, help="at least, of each rate")
    parser.add_argument("--model", default="", help="trained for its wait for data")
    parser.add_argument("--batch-size", type=int, default=32_768, help="of training")
    parser.add_argument("--micro-batch-size", type=int, default=512)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--device", default="auto")
    return parser.parse_args()


if __name__ == "__main__":
    main()
