"""What tests/conftest.py notices after each test."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from megabatch import similarity
from megabatch.similarity import settings
from tests.process_state import differences, now, restore


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("default dtype", lambda: torch.set_default_dtype(torch.float64)),
        ("default device", lambda: torch.set_default_device("meta")),
        ("threads", lambda: torch.set_num_threads(torch.get_num_threads() + 1)),
        ("deterministic", lambda: torch.use_deterministic_algorithms(True)),
        ("precision", lambda: torch.set_float32_matmul_precision("medium")),
        ("gradients", lambda: torch.set_grad_enabled(False)),
        ("workspace", lambda: similarity.set_workspace(1 << 20)),
        ("gather", lambda: settings.set_gather(0)),
        ("folder", lambda: os.chdir("/")),
        ("RANK", lambda: os.environ.update(RANK="1")),
    ],
)
def test_what_a_test_leaves_is_noticed_and_put_back(name: str, change: Callable[[], None]) -> None:
    before = now()
    change()
    assert list(differences(before)) == [name]
    restore(before)
    assert differences(before) == {}


def test_a_group_of_processes_is_noticed() -> None:
    before = now()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert differences(before) == {"group": (False, True)}
    finally:
        dist.destroy_process_group()
