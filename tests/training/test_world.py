"""How processes find each other and what they tell each other."""

from __future__ import annotations

import math

import pytest
import torch

from megabatch.errors import CommunicationError, UsageError
from megabatch.ranks import Gone
from megabatch.training import TrainConfig
from megabatch.training.world import World, command_again, joined, place
from tests.similarity.distributed.processes import World as Processes
from tests.similarity.distributed.processes import on_processes

CPU = torch.device("cpu")
TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}
SLURM = {"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "1"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, (0, 1, 0)),
        (TORCHRUN, (5, 8, 1)),
        (SLURM, (3, 4, 1)),
        ({**SLURM, **TORCHRUN}, (5, 8, 1)),  # torchrun inside of a Slurm job
        ({"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, (0, 1, 0)),  # a batch script, without srun
    ],
)
def test_the_launchers_environment(environ: dict[str, str], expected: tuple[int, ...]) -> None:
    assert place(environ) == expected


@pytest.mark.parametrize(
    "environ",
    [
        {"WORLD_SIZE": "2"},
        {**TORCHRUN, "LOCAL_RANK": "first"},
        {"SLURM_STEP_NUM_TASKS": "4"},
    ],
)
def test_an_environment_that_makes_no_sense(environ: dict[str, str]) -> None:
    with pytest.raises(UsageError, match="environment: "):
        place(environ)


def test_a_run_is_continued_by_its_launcher() -> None:
    command = "megabatch train --output 'a b'"
    assert command_again(["--output", "a b"], {}) == command
    several = command_again(["--output", "a b"], TORCHRUN)
    assert several == f"{command} (in 8 processes, started as before)"


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


def stopped(some: World, error: UsageError | None) -> tuple[str, int]:
    """What a rank says when all stop, and its exit code."""
    try:
        some.raise_if_any(error)
    except UsageError as raised:
        return str(raised), getattr(raised, "exit_code", 2)
    raise AssertionError("it went on")


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


@on_processes(3)
def test_all_stop_together_and_know_why(processes: Processes) -> None:
    rank = processes.rank
    some = World(CPU, rank, processes.size)
    some.raise_if_any()
    everywhere = stopped(some, UsageError("the same"))
    assert everywhere == ("the same", 2)
    elsewhere = stopped(some, Gone("its own") if rank == 2 else None)
    assert elsewhere == ("rank 2: its own", 1)
    mixed = stopped(some, UsageError("own" if rank else "another"))
    assert mixed[0] == "another"

    def work() -> int:
        if rank == 1:
            raise UsageError("no file")
        return 7

    with pytest.raises(UsageError, match="rank 1: no file"):
        some.attempt(work)
    assert some.attempt(lambda: 7) == 7
