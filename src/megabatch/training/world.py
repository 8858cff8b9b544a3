"""The processes that train together: how they start, exchange status, and stop together.

`torchrun` and Slurm's `srun` start one process per device and describe the group in the
environment. Status (a signal, a failure, a loss) is a few bytes that go from host to host by
`megabatch.ranks`: it waits for the other hosts and never for a device.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megabatch.config.settings import TrainConfig, resolve_device
from megabatch.errors import UsageError, one_line
from megabatch.ranks import (
    Gone,
    all_gather_values,
    lost_rank_told,
    on_all_ranks,
    raise_on_all_ranks,
)

T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """This process among those that train together.

    Attributes:
        device: where this rank computes.
        rank, size: of the default process group; with size 1 no group is used.
    """

    device: torch.device
    rank: int = 0
    size: int = 1

    @property
    def main(self) -> bool:
        """Whether this is rank 0, which writes files and prints."""
        return self.rank == 0

    @property
    def group(self) -> str | None:
        """The ranks as a group, for calls that take one."""
        return None if self.size > 1 else "local"

    def gather(self, value: T) -> list[T]:
        """Every rank's value, by rank. Values are anything that JSON can represent.

        Raises:
            Gone: a rank is gone or does not come in time.
        """
        with self.failures("exchanging status"):
            return all_gather_values(value, self.group)

    def mean(self, number: float) -> float:
        """The mean over ranks, the same on each."""
        return sum(self.gather(number)) / self.size

    def from_main(self, value: T) -> T:
        """Rank 0's value, on every rank."""
        return self.gather(value if self.main else None)[0]  # type: ignore[return-value]

    def tensors_from_main(self, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Rank 0's tensors by name, one at a time, on every rank's device."""
        if self.size == 1:
            yield from tensors.items()
            return
        for name, shape, kind in self.from_main(
            [(name, list(t.shape), str(t.dtype)) for name, t in tensors.items()]
        ):
            dtype = getattr(torch, kind.removeprefix("torch."))
            if self.main:
                tensor = tensors[name].to(self.device).contiguous()
            else:
                tensor = torch.empty(shape, dtype=dtype, device=self.device)
            self.broadcast(tensor, name)
            yield name, tensor

    def broadcast(self, tensor: Tensor, name: str) -> None:
        """Overwrite a tensor on this rank's device with rank 0's; `name` is for errors."""
        whole = tensor.contiguous()
        with self.failures(f"receiving {name} from rank 0"):
            dist.broadcast(whole.flatten().view(torch.uint8), 0)  # bytes: any dtype will do
        if whole is not tensor:
            tensor.copy_(whole)

    def raise_if_any(self, error: UsageError | None = None) -> None:
        """Continue on all ranks, or raise a UsageError on all if any has an error."""
        with self.failures("exchanging status"):
            raise_on_all_ranks(error, self.group)

    def attempt(self, work: Callable[[], T]) -> T:
        """The result of `work()` on this rank; a UsageError on any rank is raised on all."""
        with self.failures("exchanging status"):
            return on_all_ranks(work, self.group)

    @contextmanager
    def failures(self, stage: str) -> Iterator[None]:
        """Turn a failed communication into `Gone`, one line that names the stage."""
        with lost_rank_told(stage, self.rank, self.size, "--dist-timeout"):
            yield


@contextmanager
def joined(config: TrainConfig) -> Iterator[World]:
    """Form the default process group if a launcher started several processes.

    Raises:
        UsageError: the environment or the device is not usable, or the other ranks do not come.
    """
    rank, size, local_rank = place(os.environ)
    if size == 1:
        yield World(resolve_device(config.device))
        return
    device = resolve_device(config.device, local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    world = World(device, rank, size)
    try:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=config.dist_timeout),
        )
    except (RuntimeError, ValueError) as error:
        raise Gone(
            f"rank {rank} of {size} cannot join the others: {one_line(error, 400)}"
        ) from error
    yield world
    leave()  # not after an error: it would wait for ranks that may be gone


def leave() -> None:
    """Destroy the process group so that the program can exit.

    DistributedDataParallel keeps Gloo's threads alive beyond `destroy_process_group`. A thread that
    still has to release the last collective's tensors waits for the GIL; if the interpreter exits
    first, the program aborts although all its work is done: "terminate called without an active
    exception" (torch 2.15; reproduced reliably by delaying such a thread). Sleeping releases the
    GIL; 0.1 s is twenty times the interval at which a waiting thread requests it.
    """
    dist.destroy_process_group()
    time.sleep(0.1)


def place(environ: Mapping[str, str]) -> tuple[int, int, int]:
    """Rank, world size and local rank, as torchrun sets them, or else Slurm's srun.

    Raises:
        UsageError: the variables are incomplete.
    """
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    if "WORLD_SIZE" not in environ:
        # srun sets them for its step; a batch script outside of srun has none of that name.
        names = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID")
    if names[1] not in environ:
        return 0, 1, 0
    try:
        rank, size, local_rank = (int(environ[name]) for name in names)
    except (KeyError, ValueError) as error:
        raise UsageError(
            f"environment: {', '.join(names)} must be whole numbers: {error}"
        ) from None
    return rank, size, local_rank
