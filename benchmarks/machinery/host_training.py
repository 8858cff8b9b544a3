"""`megabatch train` under torchrun on two hosts, compared with one host."""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from machinery.hosts import NAMES, Host, Network

#: Seconds that a run may take.
LIMIT = 300
#: Seconds after a failure in which torchrun may end.
PATIENCE = 150
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def training(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The same run on one host, on two, and on two that fail, after which one host resumes it."""
    size = 2 * options.ranks_per_host
    with tempfile.TemporaryDirectory() as name:
        one, two, broken = (Run(Path(name, n), options) for n in ("one", "two", "broken"))
        with Network() as network:
            yield {"run": "one host", "ranks": [size], **one.to_its_end(network.hosts[:1], size)}
        with Network() as network:
            found = two.to_its_end(network.hosts, options.ranks_per_host)
            yield {
                "run": "two hosts",
                "ranks": [options.ranks_per_host] * 2,
                **found,
                **two.compared(one),
            }
        for how in ("host dies", "link dies"):
            # The second time the run resumes.
            with Network() as network:
                found = broken.until_a_failure(how, network, options.ranks_per_host)
                yield {"run": f"two hosts, {how}", **found}
        with Network() as network:
            found = broken.to_its_end(network.hosts[:1], size)
            yield {"run": "resumed on one host", "ranks": [size], **found, **broken.compared(one)}


class Run:
    """A run's folder, and the launchers that work in it."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        self.folder = folder
        self._log, self._timeout = folder.with_suffix(".log"), options.timeout
        settings = {
            "model": "glyph-small", "train-data": "glyphs", "output": folder,
            "global-batch-size": 256, "micro-batch-size": 32, "steps": options.steps, "warmup": 2,
            "precision": "fp32", "device": "cpu", "checkpoint-every": 3, "check-replicas-every": 2,
            "dist-timeout": options.timeout,
        }  # fmt: skip
        words = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
        self._training = ["-m", "megabatch", "train", *words, "--resume"]

    def to_its_end(self, hosts: Sequence[Host], per_host: int) -> dict[str, Any]:
        """Train on these hosts; seconds, and the loss of each step."""
        began = time.monotonic()
        codes = [one.wait(LIMIT) for one in self._start(hosts, per_host)]
        if any(codes):
            raise RuntimeError(self._last_lines())
        return {"seconds": time.monotonic() - began, "losses": self.losses()}

    def until_a_failure(self, how: str, network: Network, per_host: int) -> dict[str, Any]:
        """Train on two hosts until after the next checkpoint the second one or the link dies."""
        known, said = set(self._checkpoints()), len(self.log())
        launchers = self._start(network.hosts, per_host)
        begun = time.monotonic()
        if _seconds(begun, lambda: not known.issuperset(self._checkpoints()), LIMIT) is None:
            raise RuntimeError(self._last_lines())
        trainers = [rank for one in launchers for rank in _trainers(one)]
        since = time.monotonic()
        if how == "host dies":
            network.hosts[1].kill()
        else:
            network.cut()
        ended = _seconds(since, lambda: not any(map(_runs, trainers)), LIMIT)
        left = launchers[: 1 if how == "host dies" else 2]
        return {
            "dist_timeout_s": self._timeout,
            "trainers_ended_s": ended,
            "torchrun_ended_s": [_seconds(since, partial(_ended, one), PATIENCE) for one in left],
            "torchrun_exit_codes": [one.poll() for one in left],
            "steps_done": len(self.losses()),
            "said": [x for x in self.log()[said:].splitlines() if x.startswith("megabatch train")],
        }

    def log(self) -> str:
        """The output of all that worked in the folder so far."""
        return self._log.read_text() if self._log.exists() else ""

    def _checkpoints(self) -> list[Path]:
        return list(self.folder.glob("checkpoints/step-*"))

    def losses(self) -> list[float]:
        """Losses of the steps in the log."""
        lines = (self.folder / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line)["loss"] for line in lines]

    def compared(self, other: Run) -> dict[str, Any]:
        """Differences of the losses, and whether the weights are equal."""
        pairs = zip(self.losses(), other.losses(), strict=True)
        return {
            "loss_difference": max(abs(a - b) for a, b in pairs),
            "same_weights": self._weights() == other._weights(),
        }

    def _weights(self) -> str:
        return hashlib.sha256((self.folder / "model.safetensors").read_bytes()).hexdigest()

    def _start(self, hosts: Sequence[Host], per_host: int) -> list[subprocess.Popen[bytes]]:
        """torchrun on each host, as docs/distributed.md has it."""
        words = [
            sys.executable, "-m", "torch.distributed.run", f"--nnodes={len(hosts)}",
            f"--nproc-per-node={per_host}", "--rdzv-backend=c10d",
            f"--rdzv-endpoint={NAMES[0]}:29500", "--rdzv-id=1", *self._training,
        ]  # fmt: skip
        with self._log.open("ab") as log:
            return [host.start(words, _ENVIRONMENT, stdout=log, stderr=log) for host in hosts]

    def _last_lines(self) -> str:
        return "\n".join(self.log().strip().splitlines()[-20:])


def _trainers(launcher: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """The processes that train among all that a torchrun has started."""
    started = psutil.Process(launcher.pid).children(recursive=True)
    return [one for one in started if "torch.distributed.run" not in one.cmdline()]


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _ended(launcher: subprocess.Popen[bytes]) -> bool:
    return launcher.poll() is not None


def _seconds(since: float, over: Callable[[], bool], limit: float) -> float | None:
    """Wait until it is over; the seconds since then, None if the limit comes first."""
    while not over():
        if time.monotonic() - since > limit:
            return None
        time.sleep(0.05)
    return time.monotonic() - since
