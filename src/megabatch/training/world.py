"""The processes that train together: how they find each other and what they tell each other.

`torchrun` and Slurm's `srun` start one process for each device and say so in the environment. What
goes between hosts here (a signal, a failure, a loss) is a few bytes over Gloo, beside NCCL for
what is on GPUs: it waits for the other hosts and never for a device.
"""

from __future__ import annotations

import json
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
from megabatch.errors import CommunicationError, UsageError
from megabatch.similarity import set_abort_on_lost_rank

T = TypeVar("T")

_MASTER = (
    "export MASTER_ADDR=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1) "
    "MASTER_PORT=29500"
)


class Gone(UsageError):
    """Another process died, left or did not come in time."""

    exit_code = 1  # not a mistake in the command


@dataclass(frozen=True)
class World:
    """This process among those that train together.

    rank, size: which one it is, of how many. device: where its part of the work is done.
    """

    device: torch.device
    rank: int = 0
    size: int = 1

    @property
    def main(self) -> bool:
        """Whether this is the process that writes and speaks for all."""
        return self.rank == 0

    def gather(self, *numbers: float) -> list[list[float]]:
        """Every rank's numbers, as many from each, by rank.

        Raises:
            Gone: a rank is gone or does not come.
        """
        if self.size == 1:
            return [list(numbers)]
        mine = torch.tensor(numbers, dtype=torch.float64)
        table = [torch.empty_like(mine) for _ in range(self.size)]
        with self.failures("telling each other how it stands"):
            dist.all_gather(table, mine)
        return [row.tolist() for row in table]

    def mean(self, number: float) -> float:
        """The mean of every rank's number, the same on each."""
        return sum(row[0] for row in self.gather(number)) / self.size

    def texts(self, text: str) -> list[str]:
        """Every rank's text, by rank."""
        data = text.encode()
        longest = int(max(row[0] for row in self.gather(len(data))))
        if self.size == 1 or longest == 0:
            return [text] * self.size
        mine = torch.frombuffer(bytearray(data.ljust(longest, b"\0")), dtype=torch.uint8)
        table = [torch.empty_like(mine) for _ in range(self.size)]
        with self.failures("telling each other what went wrong"):
            dist.all_gather(table, mine)
        return [bytes(row.numpy()).rstrip(b"\0").decode() for row in table]

    def from_main(self, value: T) -> T:
        """What rank 0 has, as JSON carries it."""
        if self.size == 1:
            return value
        data = json.dumps(value).encode() if self.main else b""
        size = int(self.gather(len(data))[0][0])
        buffer = torch.frombuffer(bytearray(data.ljust(size)), dtype=torch.uint8)
        with self.failures("hearing from rank 0"):
            dist.broadcast(buffer, 0)
        received: T = json.loads(bytes(buffer.numpy()))
        return received

    def tensors_from_main(self, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Rank 0's tensors one after the other, by name, on every rank's device."""
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

    def broadcast(self, tensor: Tensor, what: str) -> None:
        """Give a tensor on this rank's device rank 0's values; `what` names it in errors."""
        whole = tensor.contiguous()
        with self.failures(f"receiving {what} from rank 0"):
            dist.broadcast(whole.flatten().view(torch.uint8), 0)  # of any dtype
        if whole is not tensor:
            tensor.copy_(whole)

    def settle(self, error: UsageError | None = None) -> None:
        """Go on together, or stop together where any rank has an error.

        Raises:
            UsageError: on rank 0 (its own error where there is no other), with all of them.
            SystemExit: on the others, which have nothing more to say.
        """
        if self.size == 1:
            if error is not None:
                raise error
            return
        codes = [row[0] for row in self.gather(getattr(error, "exit_code", 2) if error else 0)]
        if not any(codes):
            return
        texts = self.texts("" if error is None else str(error))
        code = int(next(code for code in codes if code))
        if not self.main:
            raise SystemExit(code)
        if error is not None and set(texts) <= {str(error), ""}:
            raise error
        raise _Together(_by_rank(texts), code)

    def attempt(self, work: Callable[[], T]) -> T:
        """What `work` gives on this rank; where it ends in a UsageError on any, all stop."""
        error: UsageError | None = None
        try:
            result = work()
        except UsageError as caught:
            error = caught
        self.settle(error)
        return result

    @contextmanager
    def failures(self, what: str) -> Iterator[None]:
        """Turn a failed communication inside into `Gone`, one line that says where it was."""
        try:
            yield
        except RuntimeError as error:
            if self.size == 1 or not _is_communication(error):
                raise
            reason = " ".join(str(error).split())
            raise Gone(
                f"rank {self.rank} of {self.size}, {what}: another process is gone or did not "
                f"come within --dist-timeout: {reason[:400]}"
            ) from error


class _Together(UsageError):
    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@contextmanager
def joined(config: TrainConfig) -> Iterator[World]:
    """Join the processes that the launcher started; alone where there was none.

    Raises:
        UsageError: the environment or the device is not usable; the others do not come.
    """
    rank, size, local_rank = place(os.environ)
    if size == 1:
        yield World(_device_or_cpu(config.device))
        return
    try:
        device = _device_of(config.device, local_rank)
        _check_rendezvous(os.environ)
    except UsageError:
        if rank == 0:
            raise
        raise SystemExit(2) from None
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
            f"rank {rank} of {size} cannot join the others at {os.environ['MASTER_ADDR']}:"
            f"{os.environ['MASTER_PORT']}: {' '.join(str(error).split())[:400]}"
        ) from error
    before = set_abort_on_lost_rank(True)  # the launcher ends the others and may start all again
    try:
        yield world
        leave()  # not after an error: it waits for ranks that may be gone
    finally:
        set_abort_on_lost_rank(before)


def leave() -> None:
    """Take leave of the group, so that the program can end.

    DistributedDataParallel keeps Gloo's threads alive beyond `destroy_process_group`. One that has
    not let go of the last collective's tensors yet waits for the interpreter's lock, and if the
    interpreter ends before, the program aborts after all its work is done: "terminate called
    without an active exception" (torch 2.15; made certain by holding such a thread back). Sleeping
    hands over the lock; 0.1 s is twenty times what a thread waits to ask for it.
    """
    dist.destroy_process_group()
    time.sleep(0.1)


def place(environ: Mapping[str, str]) -> tuple[int, int, int]:
    """Rank, number of processes, rank on this machine: from torchrun, else from Slurm's srun.

    Raises:
        UsageError: variables that do not fit together.
    """
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    if "WORLD_SIZE" not in environ:
        # Set by srun for its own step; in a batch script outside of srun there is none.
        names = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID")
    if names[1] not in environ:
        return 0, 1, 0
    try:
        rank, size, local_rank = (int(environ[name]) for name in names)
    except (KeyError, ValueError) as error:
        raise UsageError(
            f"environment: {', '.join(names)} must be whole numbers: {error}"
        ) from None
    if not (0 <= rank < size and local_rank >= 0):
        raise UsageError(f"environment: {names[0]} is {rank}, {names[1]} {size}")
    return rank, size, local_rank


def _check_rendezvous(environ: Mapping[str, str]) -> None:
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not environ.get(name)]
    if missing:
        raise UsageError(
            f"environment: {' and '.join(missing)} not set; torchrun sets them, before srun: "
            f"{_MASTER}"
        )


def _device_or_cpu(name: str) -> torch.device:
    """The device; a wrong name is told later, with all else that is wrong."""
    try:
        return resolve_device(name)
    except ValueError:
        return torch.device("cpu")


def _device_of(name: str, local_rank: int) -> torch.device:
    try:
        device = resolve_device(name)
    except ValueError as error:
        raise UsageError(f"--device {error}") from error
    if device.type != "cuda":
        return device
    count = torch.cuda.device_count()
    if device.index is not None:
        raise UsageError(
            f"--device {name}: with several processes each takes its own: cuda or auto"
        )
    if count == 1:  # the launcher shows each process its own device only
        return torch.device("cuda", 0)
    if local_rank >= count:
        raise UsageError(f"--device: process {local_rank} of this machine, which has {count} GPUs")
    return torch.device("cuda", local_rank)


def _is_communication(error: RuntimeError) -> bool:
    if isinstance(error, (CommunicationError, dist.DistError)):
        return True
    # Gloo's errors have no type of their own.
    text = str(error).lower()
    return any(word in text for word in ("gloo", "nccl", "connection closed", "timed out waiting"))


def _by_rank(texts: list[str]) -> str:
    ranks: dict[str, list[str]] = {}
    for rank, text in enumerate(texts):
        if text:
            ranks.setdefault(text, []).append(str(rank))
    return "; ".join(
        f"rank{'s' if len(who) > 1 else ''} {', '.join(who)}: {text}" for text, who in ranks.items()
    )
