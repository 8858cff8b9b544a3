"""Peak memory of the process in one forward and backward pass of CLIP's loss on the CPU.

    python benchmarks/cpu_memory.py --pairs 65536 --width 512 --output benchmarks/results/FILE.json

`megabatch bench loss` measures the same in several passes and compares it with others; this script
is for sizes at which one pass takes minutes. Linux only.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
import torch.nn.functional as F

import megabatch as mb
from megabatch.benchmarking import records


def peak_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) << 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--pairs", type=int, default=65_536)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    torch.manual_seed(0)
    x, y = (
        F.normalize(torch.randn(options.pairs, options.width), dim=1).requires_grad_()
        for _ in range(2)
    )
    scale = torch.tensor(14.3, requires_grad=True)
    before, begun = peak_bytes(), time.perf_counter()
    loss = mb.ClipLoss()(x, y, scale)
    loss.backward()
    record = {
        "contender": "megabatch",
        "device": "cpu",
        "n_devices": 1,
        "dtype": "float32",
        "b": options.pairs,
        "d": options.width,
        "threads": torch.get_num_threads(),
        "ms": 1e3 * (time.perf_counter() - begun),
        "peak_bytes_of_the_process": peak_bytes(),
        "peak_bytes_before": before,
        "loss": loss.item(),
    }
    records.write(options.output, records.command_line(options.output), [record])
    print(record)


if __name__ == "__main__":
    main()
