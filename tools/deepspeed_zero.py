"""Weights after 50 steps under DeepSpeed's ZeRO, and under DDP.

    DS_ACCELERATOR=cpu torchrun --nproc-per-node 2 tools/deepspeed_zero.py

In float32 on the CPU, which needs DeepSpeed (0.19 or newer) in the environment.
"""

from __future__ import annotations

import copy
import json
import os
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import megabatch as mb

RECORD = Path("benchmarks/results/deepspeed-zero.json")
RANK, RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
STEPS, BATCH = 50, 48


class Towers(nn.Module):
    """Features of unit length of images and texts, and the logit scale."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Sequential(nn.Linear(12, 32), nn.GELU(), nn.Linear(32, 16))
        self.text = nn.Sequential(nn.Linear(10, 32), nn.GELU(), nn.Linear(32, 16))
        self.scale = nn.Parameter(torch.tensor([1.5]))  # DeepSpeed on the CPU takes none of 0-d

    def forward(self, images: Tensor, texts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        features = F.normalize(self.image(images)), F.normalize(self.text(texts))
        return *features, self.scale.exp()


class WholeStep(nn.Module):
    """The towers with gradient caching, as one module for DDP or DeepSpeed around it."""

    def __init__(self, towers: Towers) -> None:
        super().__init__()
        self.towers = towers
        self.step = mb.GradientCache(towers, mb.ClipLoss(), micro_batch_size=8)

    def forward(self, images: Tensor, texts: Tensor) -> Tensor:
        return self.step(images, texts)


class LossAlone(nn.Module):
    def __init__(self, towers: Towers) -> None:
        super().__init__()
        self.towers, self.loss = towers, mb.ClipLoss()

    def forward(self, images: Tensor, texts: Tensor) -> Tensor:
        return self.loss(*self.towers(images, texts))


def weights(kind: type[nn.Module], stage: int | None) -> dict[str, Tensor]:
    """After training by ZeRO's stage; None: by DDP."""
    torch.manual_seed(1)
    towers = Towers()
    module: Any = kind(towers)
    optimizer: Any = torch.optim.SGD(module.parameters(), 0.1, momentum=0.9)
    if stage is None:
        module = DistributedDataParallel(module)
    else:
        config = {
            "train_micro_batch_size_per_gpu": BATCH // RANKS,
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
            "gradient_clipping": 0.0,  # its default is 1
        }
        module, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config)
    generator = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        images, texts = (torch.randn(BATCH, n, generator=generator) for n in (12, 10))
        loss = module(images.chunk(RANKS)[RANK], texts.chunk(RANKS)[RANK])
        if stage is None:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        else:
            module.backward(loss)
            module.step()
    with deepspeed.zero.GatheredParameters(list(towers.parameters()), enabled=stage == 3):
        return copy.deepcopy(towers.state_dict())


def result(kind: type[nn.Module], stage: int, expected: dict[str, Tensor]) -> dict[str, Any]:
    found: dict[str, Any] = {"contender": kind.__name__, "stage": stage, "status": "ok"}
    try:
        trained = weights(kind, stage)
    except ValueError as error:
        return found | {"status": "refused", "note": str(error)}
    largest = max(float((trained[key] - expected[key]).abs().max()) for key in expected)
    return found | {"steps": STEPS, "difference": largest}


def main() -> None:
    deepspeed.init_distributed("gloo")
    torch.set_num_threads(1)
    expected = {kind: weights(kind, None) for kind in (LossAlone, WholeStep)}
    records = [result(k, s, expected[k]) for s in (1, 2, 3) for k in (LossAlone, WholeStep)]
    if RANK == 0:
        print(*records, sep="\n")
        record = {
            "records": records,
            "n_devices": RANKS,
            "versions": {"torch": torch.__version__, "deepspeed": version("deepspeed")},
            "command": "DS_ACCELERATOR=cpu torchrun --nproc-per-node 2 tools/deepspeed_zero.py",
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        }
        RECORD.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
