"""Weights after 50 steps with PyLate's or colpali-engine's loss and with ours in its place.

    python tools/late_interaction.py
    torchrun --nproc-per-node 2 tools/late_interaction.py

Each library needs an environment of its own (see docs/integrations/late_interaction.md); the one
that is found is compared, in float64 on the CPU, and its result added to the record.
"""

from __future__ import annotations

import copy
import importlib.util
import json
import os
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.nn.functional import all_gather
from torch.nn.parallel import DistributedDataParallel

from megabatch.integrations import colpali, pylate

RECORD = Path("benchmarks/results/late-interaction-libraries.json")
RANK, RANKS = (int(os.environ.get(name, k)) for name, k in (("RANK", 0), ("WORLD_SIZE", 1)))
STEPS, BATCH = 50, 16


class Encoder(nn.Module):
    """A small transformer with the interface that PyLate's losses need."""

    skiplist, do_query_expansion = (3, 4), False

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(60, 32)
        self.layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        mask = features["attention_mask"]
        states = self.layer(self.words(features["input_ids"]), src_key_padding_mask=mask == 0)
        return features | {"token_embeddings": F.normalize(states, dim=2) * mask[..., None]}


def batches() -> Iterator[list[dict[str, Tensor]]]:
    """This process's part of each batch: queries, documents and hard negatives."""
    generator = torch.Generator().manual_seed(0)
    own = slice(RANK * BATCH // RANKS, (RANK + 1) * BATCH // RANKS)
    for _ in range(STEPS):
        columns = []
        for longest in (8, 20, 20):
            ids = torch.randint(1, 60, (BATCH, longest), generator=generator)
            lengths = torch.randint(3, longest + 1, (BATCH, 1), generator=generator)
            mask = (torch.arange(longest) < lengths).long()
            columns.append({"input_ids": (ids * mask)[own], "attention_mask": mask[own]})
        yield columns


def of_pylate(loss: Any) -> Callable[[nn.Module], Callable[..., Tensor]]:
    options: dict[str, Any] = {"gather_across_devices": RANKS > 1, "temperature": 0.5}
    return lambda model: loss(model, **options)


def of_colpali(loss: Any) -> Callable[[nn.Module], Callable[..., Tensor]]:
    """As the library's trainer calls it: with the documents of all processes."""

    def step(model: nn.Module, columns: list[dict[str, Tensor]]) -> Tensor:
        queries, documents = (model(dict(c))["token_embeddings"] for c in columns[:2])
        if RANKS > 1:
            parts = all_gather(documents)
            for part in parts:  # Gloo's are wrong for gradients that are not contiguous
                part.register_hook(lambda g: g.contiguous())
            documents = torch.cat(parts)
        value: Tensor = loss(queries, documents, RANK * len(queries))
        return value

    return lambda model: lambda columns: step(model, columns)


def weights(make: Callable[[nn.Module], Callable[..., Tensor]]) -> dict[str, Tensor]:
    torch.manual_seed(1)
    inner = Encoder().double()
    model: nn.Module = DistributedDataParallel(inner) if RANKS > 1 else inner
    loss, optimizer = make(model), torch.optim.AdamW(model.parameters(), 1e-3)
    for columns in batches():
        optimizer.zero_grad()
        loss(columns).backward()
        optimizer.step()
    return copy.deepcopy(inner.state_dict())


def comparisons() -> Iterator[tuple[str, Any, Any]]:
    if importlib.util.find_spec("pylate"):
        from pylate import losses

        name = f"pylate {version('pylate')}, Contrastive"
        yield name, of_pylate(losses.Contrastive), of_pylate(pylate.CachedContrastive)
    if importlib.util.find_spec("colpali_engine"):
        from colpali_engine.loss import ColbertLoss

        for filtering in (False, True):
            name = f"colpali-engine {version('colpali-engine')}, ColbertLoss, {filtering=}"
            options = {"pos_aware_negative_filtering": filtering}
            theirs, ours = (kind(**options) for kind in (ColbertLoss, colpali.ColbertLoss))
            yield name, of_colpali(theirs), of_colpali(ours)


def main() -> None:
    if RANKS > 1:
        dist.init_process_group("gloo")
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {"records": []}
    for name, theirs, ours in comparisons():
        a, b = weights(theirs), weights(ours)
        largest = max(float((a[key] - b[key]).abs().max()) for key in a)
        found = {"contender": name, "n_devices": RANKS, "steps": STEPS, "difference": largest}
        print(found)
        record["records"].append(found | {"torch": torch.__version__})
    record["command"] = "torchrun --nproc-per-node N tools/late_interaction.py, N = 1 and 2"
    record["date"] = datetime.now(timezone.utc).isoformat(timespec="seconds")
    if RANK == 0:
        RECORD.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
