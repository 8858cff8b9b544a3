"""What is said of batch normalisation, and how it is synchronised; over NCCL see test_gpu_ranks."""

from __future__ import annotations

import functools
from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch import nn

from megabatch.config.objective import create_objective
from megabatch.models import create
from megabatch.models.layers import lock, set_modes
from megabatch.training import TrainConfig
from megabatch.training.batch_norm import batch_norms, explanation, problems, synchronise
from megabatch.training.world import World
from tests.similarity.distributed.processes import World as Processes
from tests.similarity.distributed.processes import on_processes
from tests.training.bn_towers import BnTowers, alone, on_ranks

ALONE = World(torch.device("cpu"))
FOUR = World(torch.device("cuda"), 0, 4)
CONFIG = TrainConfig(model="RN50", global_batch_size=4096, micro_batch_size=512)


def test_what_is_told() -> None:
    module = BnTowers()
    assert "(3 layers). It normalises over 512 pairs at a time: --micro-batch-size" in explanation(
        module, CONFIG, ALONE
    )
    several = explanation(module, replace(CONFIG, micro_batch_size=2048), FOUR)
    assert "1,024 pairs at a time on each process alone, and keeps rank 0's" in several
    assert "(--use-bn-sync takes" in several
    synced = explanation(module, replace(CONFIG, use_bn_sync=True), FOUR)
    assert "over 2,048 pairs at a time, 512 of each process: --micro-batch-size" in synced
    assert "use-bn-sync" not in synced
    assert explanation(create("glyph-small").module, CONFIG, ALONE) == ""


def test_a_locked_tower_normalises_by_what_it_remembers() -> None:
    module = create("RN50").module
    assert len(batch_norms(module)) == 55
    lock(module, "image")
    assert not batch_norms(set_modes(module))


def test_what_cannot_be_synchronised() -> None:
    wanted = replace(CONFIG, use_bn_sync=True)
    assert problems(wanted, ALONE) == []
    assert problems(wanted, FOUR) == []
    assert problems(CONFIG, World(torch.device("cpu"), 0, 2)) == []
    assert problems(wanted, World(torch.device("cpu"), 0, 2)) == [
        "--use-bn-sync: torch synchronises batch normalisation on GPUs only"
    ]
    assert problems(replace(wanted, global_batch_size=4097), FOUR) == [
        "--use-bn-sync: --global-batch-size 4097 over 4 processes, expected as many on each"
    ]


def test_parameters_names_and_activations_stay() -> None:
    from timm.layers import BatchNormAct2d

    module = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), BatchNormAct2d(4))
    before = dict(module.named_parameters())
    names = module.state_dict().keys()
    after = synchronise(module, FOUR)
    assert {name: id(p) for name, p in after.named_parameters()} == {
        name: id(p) for name, p in before.items()
    }
    assert after.state_dict().keys() == names
    assert [isinstance(m, nn.SyncBatchNorm) for m in after] == [False, True, True]
    assert isinstance(after[2].act, nn.ReLU)
    untouched = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    assert not isinstance(synchronise(untouched, ALONE)[1], nn.SyncBatchNorm)


@on_processes(2)
def test_synchronised_it_is_that_of_all_rows(processes: Processes) -> None:
    cpu = torch.device("cpu")
    by_itself = functools.partial(create_objective, group="local")
    with mock.patch("megabatch.training.trainer.create_objective", by_itself):
        expected, weights = alone(cpu, processes.size)
    for parallel in ("ddp", "fsdp"):
        losses, found = on_ranks(World(cpu, processes.rank, processes.size), parallel)
        assert losses == pytest.approx(expected, rel=1e-3)
        for name, value in found.items():
            whole = weights[name].reshape(value.shape)
            torch.testing.assert_close(value, whole, atol=1e-3, rtol=1e-2, msg=name)


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=pytest.mark.gpu)])
def test_one_process_needs_no_synchronisation(device: str) -> None:
    place = torch.device(device)
    assert on_ranks(World(place), "ddp")[0] == pytest.approx(alone(place, 1)[0], rel=1e-4)
