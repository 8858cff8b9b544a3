"""Trainings on two processes, in one pair of them: it imports the libraries once, for seconds."""

from __future__ import annotations

import faulthandler
import os
import sys
from pathlib import Path

import pytest

from megabatch.training.world import leave
from tests.integrations.forks import run_in_forks
from tests.similarity.distributed.processes import World, join, new_store, torchrun_environment

SIZE = 2
SECONDS = 240  # that all checks may take

#: Modules whose functions `on_two_...` run one after another; FSDP2 and Lightning at the end.
MODULES = [
    f"{__package__}.test_{name}"
    for name in (
        *("lightly", "pytorch_metric_learning", "sentence_transformers_training"),
        *("transformers", "lightning"),
    )
]


@pytest.mark.concurrency
def test_on_two_processes(tmp_path: Path) -> None:
    store = new_store()
    calls = [(check_all, (rank, store.port, tmp_path)) for rank in range(SIZE)]
    run_in_forks(MODULES, calls, tmp_path, SECONDS + 60)


def check_all(rank: int, port: int, folder: Path) -> None:
    faulthandler.dump_traceback_later(SECONDS, exit=True)
    os.environ |= torchrun_environment(rank, SIZE, port)
    join(rank, SIZE, port)
    for module in filter(None, map(sys.modules.get, MODULES)):
        for name, check in vars(module).items():
            if name.startswith("on_two_"):
                check(World(rank, SIZE, folder))
    leave()
