"""What each process of `torchrun -m tests.training.ranks_worker FOLDER` does: runs.

FOLDER/jobs.json lists for each run the file of its configuration, whether it is resumed, the step
in which rank 1 gets a SIGTERM (or null), and a port. FOLDER/codes-RANK.json tells how each ended.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from megabatch.cli import main
from megabatch.data import Batch
from megabatch.training.trainer import Trainer


def _all(folder: Path) -> None:
    torch.set_num_threads(1)
    torch.backends.cudnn.allow_tf32 = False
    rank = int(os.environ["RANK"])
    # Each run forms its group anew, by a store of its own: torchrun's keeps the last. It is where
    # this was started.
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    codes = []
    for job in json.loads((folder / "jobs.json").read_text()):
        os.environ["MASTER_PORT"] = str(job["port"])
        _stop_in(job["stop"] if rank == 1 else None)
        codes.append(main(["train", "--config", job["config"], *["--resume"] * job["resume"]]))
        if dist.is_initialized():  # after an error nobody takes leave
            break
    (folder / f"codes-{rank}.json").write_text(json.dumps(codes))


_train_step = Trainer.train_step


def _stop_in(step: int | None) -> None:
    def train_step(self: Trainer, batch: Batch) -> dict[str, float]:
        if self.step == step:
            os.kill(os.getpid(), signal.SIGTERM)
        return _train_step(self, batch)

    Trainer.train_step = train_step  # type: ignore[method-assign]


if __name__ == "__main__":
    _all(Path(sys.argv[1]))
