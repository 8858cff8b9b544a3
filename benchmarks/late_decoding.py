"""Host memory of a batch of images, decoded early and late.

    python benchmarks/late_decoding.py --output benchmarks/results/late-decoding.json

Draws pictures, writes them as JPEG files in a shard, loads at least two batches, each read as in a
step of gradient caching (two passes over micro-batches), and measures the peak memory of the
process and its workers, with shared memory counted once (PSS), above that before the first batch.
Larger batches (--undecoded) are loaded without reading a row, for the memory of the files.
"""

from __future__ import annotations

import argparse
import io
import json
import platform
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import open_clip
import psutil
import torch
from PIL import Image, ImageFilter

from megabatch.data import PairLoader, open_pairs
from megabatch.data.late import mean_bytes
from megabatch.models.images import with_bytes

SIDE = 224  # pixels of the model's images


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--undecoded", type=int, nargs="+", default=[8192, 32768])
    parser.add_argument("--micro-batch-size", type=int, default=64)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--output", type=Path)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        shard = _write_shard(Path(folder) / "pictures.tar", 2 * max(chosen.batch_sizes))
        records = [
            _measure(shard, size, late, chosen.micro_batch_size, chosen.workers)
            for size in chosen.batch_sizes
            for late in (False, True)
        ]
        records += [
            _measure(shard, size, True, chosen.micro_batch_size, chosen.workers, passes=0)
            for size in chosen.undecoded
        ]
    record = {
        "command": "benchmarks/late_decoding.py",
        "machine": f"{platform.machine()}, {psutil.cpu_count()} cores",
        "versions": {"torch": torch.__version__, "open_clip": open_clip.__version__},
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "micro_batch_size": chosen.micro_batch_size,
        "workers": chosen.workers,
        "records": records,
    }
    if chosen.output:
        chosen.output.write_text(json.dumps(record, indent=1) + "\n")


def _measure(
    shard: Path, size: int, late: bool, micro: int, workers: int, passes: int = 2
) -> dict[str, object]:
    count = len(open_pairs(str(shard)))
    factor = max(1.0, 2 * size / count)  # at least two batches
    dataset = open_pairs(str(shard), upsampling_factors=[factor])
    loader = PairLoader(
        dataset,
        batch_size=size,
        transform=_transform(),
        tokenizer=lambda captions: torch.zeros(len(captions), 77, dtype=torch.int64),
        seed=0,
        workers=workers,
        late=micro if late else None,
    )
    with _Peak() as peak:
        start, total = time.perf_counter(), 0.0
        for batch in loader:
            peak.look()  # a small batch may end before the first sample
            for _ in range(passes):
                for first in range(0, size, micro):
                    total += float(batch.images[first : first + micro].sum())
        seconds = time.perf_counter() - start
    record = {
        "decode": "late" if late else "early",
        "b": size,
        "passes": passes,
        "peak_bytes": peak.bytes,
        "bytes_a_pair": round(peak.bytes / size),
        "seconds": round(seconds, 2),
        "file_bytes": round(mean_bytes(dataset)),
        "pixel_bytes": 3 * SIDE * SIDE,
        "sum": total,
    }
    print(record, flush=True)
    return record


def _transform() -> Callable[[Any], torch.Tensor]:
    """OpenCLIP's augmentation up to bytes, as the trainer has it."""
    transforms = (open_clip.image_transform(SIDE, is_train=train) for train in (True, False))
    return with_bytes(torch.nn.Identity(), *transforms)[0]


class _Peak:
    """Peak memory of this process and its children, above that at the start."""

    def __enter__(self) -> _Peak:
        self._before = _taken()
        self._looks = [0]  # appended to by two threads
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(0.05):
            self.look()

    def look(self) -> None:
        self._looks.append(_taken() - self._before)

    @property
    def bytes(self) -> int:
        return max(self._looks)


def _taken() -> int:
    total = 0
    for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
        try:
            total += process.memory_full_info().pss
        except psutil.Error:
            continue
    return total


def _write_shard(path: Path, count: int) -> Path:
    """Smooth pictures of 320 x 240 pixels, about 28 kB each."""
    random = np.random.default_rng(0)
    with tarfile.open(path, "w") as tar:
        for i in range(count):
            coarse = Image.fromarray(random.integers(0, 256, (30, 40, 3), dtype=np.uint8))
            picture = coarse.resize((320, 240), Image.Resampling.BICUBIC)
            picture = Image.fromarray(
                (np.asarray(picture) + random.normal(0, 6, (240, 320, 1)))
                .clip(0, 255)
                .astype(np.uint8)
            ).filter(ImageFilter.GaussianBlur(0.6))
            file = io.BytesIO()
            picture.save(file, "jpeg", quality=90)
            for name, data in ((f"{i:06}.jpg", file.getvalue()), (f"{i:06}.txt", b"a picture")):
                member = tarfile.TarInfo(name)
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    return path


if __name__ == "__main__":
    main()
