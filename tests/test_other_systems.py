"""macOS and Windows, simulated: without Triton and what only POSIX has, with spawned workers.

Nothing has run on these systems themselves.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.data.samples import sample, write_tar

ROOT = Path(__file__).parents[1]

#: What a process finds there, after the libraries that know the system themselves.
PROGRAM = """
import multiprocessing, os, signal, sys
sys.modules["triton"] = None  # importing it fails

import fsspec, matplotlib.pyplot, psutil, rich.console, torch, torch.distributed.fsdp, torchvision
import torch.optim.swa_utils, torch.utils.data, torch.utils.tensorboard, webdataset

if __name__ == "__main__":
    for name in ("fcntl", "resource", "termios"):
        sys.modules[name] = None
    for name in ("pread", "fork", "EX_TEMPFAIL", "sched_getaffinity"):
        delattr(os, name)
    for name in ("SIGUSR1", "sigwaitinfo"):
        delattr(signal, name)
    multiprocessing.set_start_method("spawn")

    import megabatch as mb

    x, y = (torch.randn(64, 8, requires_grad=True) for _ in range(2))
    towers = torch.nn.Linear(8, 4), torch.nn.Linear(8, 4)
    step = mb.GradientCache(towers, mb.NTXentLoss(0.1, normalize=True), micro_batch_size=16)
    step(torch.randn(64, 8), torch.randn(64, 8)).backward()
    assert all(tower.weight.grad is not None for tower in towers)
    mb.ClipLoss()(x, y, logit_scale=torch.tensor(2.0)).backward()
    assert mb.similarity.topk(x, y, 2)[1].shape == (64, 2)

    from megabatch.cli import main
    train = "train --model glyph-small --train-data pairs.tar --device cpu --plan off --steps 2"
    train += " --global-batch-size 4 --micro-batch-size 2 --checkpoint-every 1"
    assert main(f"{train} --workers 1 --output workers".split()) == 0
    sys.platform = "win32"  # with which this system's own multiprocessing does not work
    assert main(f"{train} --workers 0 --output run".split()) == 0
"""


@pytest.mark.concurrency
def test_losses_and_the_trainer_run(tmp_path: Path) -> None:
    members = [member for i in range(4) for member in sample(str(i), i, f"text {i}")]
    write_tar(tmp_path / "pairs.tar", members)
    (tmp_path / "program.py").write_text(PROGRAM)
    ended = subprocess.run(
        [sys.executable, "program.py"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
