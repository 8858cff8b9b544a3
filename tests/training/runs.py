"""What tests of whole runs ask a run's folder and its process."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from megabatch.training import TrainConfig, save_config
from megabatch.training.trainer import Trainer
from tests.programs import Program

# As the program, with the tests' own architecture and one thread.
PROGRAM = """
import sys, torch, tests.models.tiny
from megabatch.cli import main
torch.set_num_threads(1)
sys.exit(main(sys.argv[1:]))
"""


def weights(run: Path) -> bytes:
    return (run / "model.safetensors").read_bytes()


def logged(run: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / name).read_text().splitlines()]


def checkpoints(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def signal_after(patch: pytest.MonkeyPatch, step: int, number: signal.Signals) -> None:
    """Send this process a signal in the middle of a step."""
    original = Trainer.train_step

    def train_step(self: Trainer, batch: object) -> dict[str, float]:
        if self.step == step:
            os.kill(os.getpid(), number)
        return original(self, batch)  # type: ignore[arg-type]

    patch.setattr(Trainer, "train_step", train_step)


def start(config: TrainConfig) -> Program:
    path = config.output.with_suffix(".toml")
    save_config(config, path)
    options = ["--config", str(path), *["--resume"] * config.resume]
    return Program(["-c", PROGRAM, "train", *options])


def wait_for_steps(process: Program, run: Path, steps: int) -> None:
    deadline = time.monotonic() + 120
    while len(logged_lines(run)) < steps:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.005)


def logged_lines(run: Path) -> list[str]:
    path = run / "metrics.jsonl"
    return path.read_text().splitlines() if path.exists() else []


def losses(run: Path) -> list[float]:
    return [record["loss"] for record in logged(run)]


def is_there(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
