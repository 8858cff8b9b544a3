"""Trainings on two processes, in one pair of them: it imports the libraries once, for seconds."""

from __future__ import annotations

import faulthandler
import importlib
import importlib.util
import multiprocessing
import os
import traceback
from pathlib import Path
from typing import Any

import pytest

from megabatch.training.world import leave
from tests.server import forked
from tests.similarity.distributed.processes import World, join, new_store, torchrun_environment

SIZE = 2
SECONDS = 240  # that all checks may take

#: Functions of a module here, which run one after another, and the libraries that it needs.
CHECKS = {
    "test_sentence_transformers_training": (
        ["on_two_trains_as_the_librarys_do", "on_two_shards_of_different_sizes"],
        ["sentence_transformers", "datasets", "accelerate"],
    ),
    "test_transformers": (
        [
            "on_two_the_models_own_loss_under_ddp",
            "on_two_a_loop_with_accelerate",
            "on_two_the_trainers_fsdp2",
        ],
        ["transformers", "accelerate", "peft"],
    ),
    "test_lightly": (
        ["on_two_trains_what_lightly_trains", "on_two_different_numbers_of_views"],
        ["lightly"],
    ),
    "test_pytorch_metric_learning": (
        ["on_two_the_distributed_wrapper"],
        ["pytorch_metric_learning"],
    ),
    "test_lightning": (["on_two_under_ddp", "on_two_sharded"], ["lightning"]),
}


@pytest.mark.concurrency
def test_on_two_processes(tmp_path: Path) -> None:
    names = [
        (f"{__package__}.{module}", name)
        for module, (checks, libraries) in CHECKS.items()
        if all(map(importlib.util.find_spec, libraries))
        for name in checks
    ]
    store = new_store()
    process = forked(_import_and_fork, names, store.port, tmp_path)
    process.join(SECONDS + 60)
    process.kill()
    for rank in range(SIZE):
        found = tmp_path / f"rank-{rank}"
        assert found.exists(), f"rank {rank} did not end"
        assert not found.read_text(), f"rank {rank}: {found.read_text()}"


def _import_and_fork(names: list[tuple[str, str]], port: int, folder: Path) -> None:
    for module, _ in names:
        importlib.import_module(module)
    context: Any = multiprocessing.get_context("fork")
    started = [
        context.Process(target=_run, args=(rank, names, port, folder)) for rank in range(SIZE)
    ]
    for process in started:
        process.start()
    for process in started:
        process.join()


def _run(rank: int, names: list[tuple[str, str]], port: int, folder: Path) -> None:
    faulthandler.dump_traceback_later(SECONDS, exit=True)
    os.environ |= torchrun_environment(rank, SIZE, port)
    failure = ""
    try:
        join(rank, SIZE, port)
        for module, name in names:
            getattr(importlib.import_module(module), name)(World(rank, SIZE, folder))
    except BaseException:  # also pytest's outcomes
        failure = traceback.format_exc()
    (folder / f"rank-{rank}").write_text(failure)
    if not failure:
        leave()
    os._exit(bool(failure))  # closes the connections that the other rank may wait for
