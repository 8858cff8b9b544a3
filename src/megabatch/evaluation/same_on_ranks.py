"""The check that all ranks evaluate the same weights on the same data in the same way."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch

from megabatch.errors import UsageError
from megabatch.evaluation.classification import ClassTask
from megabatch.evaluation.config import EvalConfig
from megabatch.evaluation.run_folder import Opened
from megabatch.evaluation.tasks import Task
from megabatch.ranks import all_gather_values
from megabatch.similarity.distributed.comm import rank_and_size

# Settings that may differ: of the process, and paths, since each machine may have its own copies.
_OF_A_RANK = {
    *("device", "workers", "output", "run", "pretrained", "val_data", "image_folder"),
    *("class_data", "class_train_data", "class_names", "templates"),
}


def check_ranks(
    config: EvalConfig,
    opened: Opened,
    tasks: Sequence[Task],
    classes: ClassTask | None,
    group: object,
) -> None:
    """Raise a UsageError, on all ranks, if their settings, weights or numbers of samples differ.

    Each rank reads the files for itself and encodes its own part: with other files than rank 0's,
    some samples would count twice and others not at all.
    """
    if rank_and_size(group)[1] == 1:
        return
    found = all_gather_values(_facts(config, opened, tasks, classes), group)
    for rank, facts in enumerate(found):
        for name, value in facts.items():
            if value != found[0][name]:
                raise UsageError(
                    f"{name}: {value} on rank {rank}, {found[0][name]} on rank 0; expected the "
                    "same on all of them"
                )


def _facts(
    config: EvalConfig, opened: Opened, tasks: Sequence[Task], classes: ClassTask | None
) -> dict[str, Any]:
    """By their names for the user, as JSON can represent them; the same names on each rank."""
    own = {f.name for f in fields(config)} - _OF_A_RANK
    facts: dict[str, Any] = {
        "--" + name.replace("_", "-"): str(getattr(config, name)) for name in sorted(own)
    }
    facts["number of tasks"] = len(tasks)
    for number, task in enumerate(tasks):
        facts[f"samples of retrieval task {number + 1}"] = len(task.samples)
    if classes is not None:
        facts["images of --class-data"] = len(classes.test)
        facts["classes of --class-data"] = classes.test.classes
        if classes.prompts is not None:
            facts["checksum of the prompts"] = zlib.crc32(repr(classes.prompts.texts()).encode())
        if classes.train is not None:
            facts["images of --class-train-data"] = len(classes.train)
            facts["classes of --class-train-data"] = classes.train.classes
    if opened.weights is not None:
        facts["checksum of the weights"] = _checksum(opened.towers.module)
    return facts


def _checksum(module: torch.nn.Module) -> int:
    found = 0
    for tensor in module.state_dict().values():
        data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
        found = zlib.crc32(data.numpy(), found)
    return found
