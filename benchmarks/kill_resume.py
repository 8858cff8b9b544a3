"""Resuming after kill -9 at random points, compared with an undisturbed run.

    python benchmarks/kill_resume.py --kills 20 --output benchmarks/results/kill-resume.json

A run of `megabatch train` on the CPU is killed at random moments (while it starts, reads, trains or
saves), restarted with --resume each time, and finally left to finish. It must end with the same
weights, bit for bit, as an undisturbed run, with the same samples in the same order in every step,
including repeated ones. With --processes 2 one of the two, at random, is killed, and the other must
exit on its own. The exit code is 1 if anything differs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from PIL import Image

from machinery.ranks import free_port
from megabatch.benchmarking import records

# The program, which also records the samples of each step on each process.
_PROGRAM = """
import hashlib, os, sys
import torch
from megabatch.cli import main
from megabatch.training.trainer import Trainer
torch.set_num_threads(1)
step = Trainer.train_step
order = os.open(os.environ["ORDER"], os.O_APPEND | os.O_CREAT | os.O_WRONLY)
def train_step(self, batch):
    seen = hashlib.sha256(batch.indices.numpy().tobytes()).hexdigest()[:16]
    os.write(order, f"{self.world.rank} {self.step} {seen}\\n".encode())
    return step(self, batch)
Trainer.train_step = train_step
sys.exit(main(sys.argv[1:]))
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--parallel", default="ddp", choices=("ddp", "fsdp"))
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    moments = random.Random(options.seed)
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = _pictures(folder / "pictures")
        straight, killed = (Run(folder / n, data, options) for n in ("straight", "killed"))
        assert straight.wait(straight.start()) == 0, straight.log()
        kills = [_kill(killed, moments) for _ in range(options.kills)]
        assert killed.wait(killed.start()) == 0, killed.log()
        record = {
            "contender": "megabatch",
            "device": "cpu",
            "n_devices": options.processes,
            "parallel": options.parallel,
            "steps": options.steps,
            "kills": len(kills),
            "killed_after_step": [step for step, _ in kills],
            "killed_while_saving": sum(saving for _, saving in kills),
            "steps_done": killed.steps_done(),
            "same_weights": straight.weights() == killed.weights(),
            "same_order": straight.order() == killed.order(),
            "seconds": round(time.perf_counter() - begun, 1),
        }
    if options.output is not None:
        records.write(options.output, records.command_line(options.output), [record])
    print(json.dumps(record))
    return 0 if record["same_weights"] and record["same_order"] else 1


class Run:
    """A run's folder and the successive processes that work in it."""

    def __init__(self, folder: Path, data: Path, options: argparse.Namespace) -> None:
        self.folder = folder
        self._order = folder.with_suffix(".order")
        self._log = folder.with_suffix(".log")
        self._processes = options.processes
        settings = {
            "model": "glyph-small", "train-data": data, "output": folder,
            "parallel": options.parallel,
            "global-batch-size": 16, "micro-batch-size": 4, "steps": options.steps, "warmup": 5,
            "precision": "fp32", "device": "cpu", "checkpoint-every": 3, "workers": 1,
            "dist-timeout": 20,
        }  # fmt: skip
        words = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
        self._command = [sys.executable, "-c", _PROGRAM, "train", *words, "--resume"]

    def start(self) -> list[subprocess.Popen[bytes]]:
        environment = {**os.environ, "ORDER": str(self._order), "OMP_NUM_THREADS": "1"}
        environment |= {"WORLD_SIZE": str(self._processes), "MASTER_ADDR": "127.0.0.1"}
        environment["MASTER_PORT"] = str(free_port())
        with self._log.open("ab") as log:
            return [
                subprocess.Popen(
                    self._command, stdout=log, stderr=log,
                    env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                )
                for rank in range(self._processes)
            ]  # fmt: skip

    def wait(self, processes: list[subprocess.Popen[bytes]]) -> int:
        return max(abs(process.wait(timeout=600)) for process in processes)

    def log(self) -> str:
        return self._log.read_text()

    def weights(self) -> str:
        return hashlib.sha256((self.folder / "model.safetensors").read_bytes()).hexdigest()

    def steps_done(self) -> int:
        """The number of steps started, repeated ones included."""
        return len(self._order.read_text().splitlines()) // self._processes

    def order(self) -> dict[str, set[str]]:
        """The samples by rank and step, which must be the same however often a step was done."""
        seen: dict[str, set[str]] = {}
        for line in self._order.read_text().splitlines():
            rank, step, samples = line.split()
            seen.setdefault(f"{rank} {step}", set()).add(samples)
        return seen

    def last_step(self) -> int:
        lines = self._order.read_text().splitlines() if self._order.exists() else []
        return int(lines[-1].split()[1]) if lines else -1


def _kill(run: Run, moments: random.Random) -> tuple[int, bool]:
    """Kill one of the run's processes at a random moment; the last step begun, and whether a save
    was cut short. Every fourth time the moment may be before the first step."""
    processes, before = run.start(), run.last_step()
    size = run._order.stat().st_size if run._order.exists() else 0
    if moments.random() < 0.75:
        while not run._order.exists() or run._order.stat().st_size == size:
            assert all(process.poll() is None for process in processes), run.log()
            time.sleep(0.01)
        time.sleep(moments.uniform(0, 2))
    else:
        time.sleep(moments.uniform(0, 8))
    victim = moments.choice(processes)
    assert victim.poll() is None, f"the run ended after {before} steps: more --steps are needed"
    victim.send_signal(signal.SIGKILL)
    for process in processes:
        process.wait(timeout=60)  # the others end on their own
    return run.last_step(), any(run.folder.glob("checkpoints/.step-*.partial-*"))


def _pictures(folder: Path) -> Path:
    folder.mkdir()
    noise = np.random.default_rng(0)
    rows = ["filepath,title"]
    for i in range(200):
        pixels = noise.integers(0, 256, (32, 32), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{i}.png")
        rows.append(f"{i}.png,picture number {i}")
    table = folder / "pictures.csv"
    table.write_text("\n".join(rows) + "\n")
    return table


if __name__ == "__main__":
    sys.exit(main())
