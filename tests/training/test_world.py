"""How processes find each other and what they tell each other."""

from __future__ import annotations

import math

import pytest
import torch

from megabatch.errors import CommunicationError, UsageError
from megabatch.ranks import Gone
from megabatch.training import TrainConfig
from megabatch.training.world import World, joined, place
from tests.similarity.distributed.processes import World as Processes
from tests.similarity.distributed.processes import on_processes

CPU = torch.device("cpu")
TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}
SLURM = {"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "1"}


def test_the_launchers_environment() -> None:
    assert place({}) == (0, 1, 0)
    assert place(TORCHRUN) == place({**SLURM, **TORCHRUN}) == (5, 8, 1)
    assert place(SLURM) == (3, 4, 1)
    script = {"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}  # a batch script, without srun
    assert place(script) == (0, 1, 0)
    for wrong in ({"WORLD_SIZE": "2"}, {**TORCHRUN, "LOCAL_RANK": "first"}):
        with pytest.raises(UsageError, match="environment: "):
            place(wrong)


def test_srun_needs_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    for name in ("MASTER_ADDR", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    told = "rank 3 of 4 cannot join the others: .*MASTER_ADDR expected, but not set"
    with pytest.raises(Gone, match=told), joined(TrainConfig(device="cpu")):
        pass


def test_alone_everything_is_said_to_oneself() -> None:
    alone = World(CPU)
    assert alone.main
    assert alone.gather([1, 2.5]) == [[1, 2.5]]
    assert alone.mean(3.0) == 3.0
    assert alone.from_main({"a": [1]}) == {"a": [1]}
    tensors = {"a": torch.ones(2)}
    assert dict(alone.tensors_from_main(tensors)) == tensors
    alone.raise_if_any()
    with pytest.raises(UsageError, match="mine"):
        alone.raise_if_any(UsageError("mine"))
    with pytest.raises(RuntimeError, match="gloo"), alone.failures("step 1"):
        raise RuntimeError("gloo")


@pytest.mark.parametrize(
    "error",
    [
        CommunicationError("clip_loss: ring step 1"),
        RuntimeError("[../gloo/transport/tcp/pair.cc] Connection closed by peer"),
        torch.distributed.DistBackendError("NCCL communicator was aborted"),
    ],
)
def test_a_failed_communication_is_one_line(error: RuntimeError) -> None:
    some = World(CPU, 1, 4)
    message = r"^rank 1 of 4, step 7: another process is gone, or did not respond "
    with pytest.raises(Gone, match=message), some.failures("step 7"):
        raise error
    with pytest.raises(RuntimeError, match="out of memory"), some.failures("step 7"):
        raise RuntimeError("CUDA out of memory")


@on_processes(3)
def test_what_is_told(processes: Processes) -> None:
    rank = processes.rank
    some = World(CPU, rank, processes.size)
    assert some.main == (rank == 0)
    assert some.gather([rank, 0.5 * rank]) == [[0, 0], [1, 0.5], [2, 1.0]]
    assert math.isnan(some.mean(math.nan if rank == 2 else 1.0))
    assert some.mean(float(rank)) == 1.0
    assert some.gather("ab" * rank) == ["", "ab", "abab"]
    assert some.from_main({"rank": rank, "é": None}) == {"rank": 0, "é": None}
    for kind in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
        sent = {"a": torch.arange(6).view(2, 3).t().to(kind), "b": torch.tensor(3).to(kind)}
        got = dict(some.tensors_from_main(sent if rank == 0 else {}))
        assert all(torch.equal(got[name], sent[name]) for name in ("a", "b"))
        assert got["a"].dtype == kind
    spread = torch.full((3, 2), float(rank)).t()
    some.broadcast(spread, "a transposed one")
    assert spread.sum() == 0
    with pytest.raises(UsageError, match="rank 2: no file") as caught:
        some.raise_if_any(Gone("no file") if rank == 2 else None)
    assert caught.value.exit_code == 1
    assert some.attempt(lambda: 7) == 7
