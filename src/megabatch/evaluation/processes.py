"""Evaluation on several processes: each encodes and ranks its share, and all learn the whole.

Shares are runs of whole batches (whole blocks where features are ranked), so every product has the
shape that it has in one process, and so have the figures: equal to the last digit.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from megabatch import torch_internals
from megabatch.errors import UsageError
from megabatch.similarity.distributed.comm import rank_and_size

T = TypeVar("T")

# Reading a class of a hundred thousand files, or fitting a probe, takes its time on one rank.
_TIMEOUT = timedelta(hours=2)


@contextmanager
def torchrun() -> Iterator[None]:
    """The default group as long as this lasts, where torchrun (or Slurm's likes) started several.

    Raises:
        UsageError: the environment names a group, but it cannot be formed.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) < 2 or dist.is_initialized():
        yield
        return
    try:
        if torch.cuda.is_available():
            torch.cuda.set_device(local_rank() % torch.cuda.device_count())
        dist.init_process_group(timeout=_TIMEOUT)  # Gloo, and NCCL where there is CUDA
    except (ValueError, RuntimeError) as error:
        raise UsageError(
            f"the processes cannot be joined: {' '.join(str(error).split())}"
        ) from error
    try:
        yield
    finally:
        dist.destroy_process_group()


def local_rank() -> int:
    """This process's number on its host, 0 if it is alone."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def is_first(group: object = None) -> bool:
    """Whether this is the process that prints and writes."""
    return rank_and_size(group)[0] == 0


def share(n: int, group: object, *, block: int = 1) -> range:
    """This process's run of `range(n)`, all of which is covered once, from multiples of `block`."""
    rank, size = rank_and_size(group)
    blocks = -(-n // block)
    start, stop = (min(n, block * (blocks * r // size)) for r in (rank, rank + 1))
    return range(start, stop)


def gather_rows(rows: Tensor, group: object) -> Tensor:
    """The rows of all processes, in the order of ranks, on each of them.

    Args:
        rows: (m, ...), m may differ; other sizes, dtype and kind of device may not.
        group: None for the default group where there is one, a process group, or "local".
    """
    _, size = rank_and_size(group)
    if size == 1:
        return rows
    counts = [torch.zeros(1, dtype=torch.int64, device=rows.device) for _ in range(size)]
    mine = torch.tensor([len(rows)], device=rows.device)
    dist.all_gather(counts, mine, group=_process_group(group))
    numbers = [int(count) for count in counts]
    padded = rows.new_zeros(max(numbers), *rows.shape[1:])  # backends want equal sizes
    padded[: len(rows)] = rows
    parts = [torch.empty_like(padded) for _ in numbers]
    dist.all_gather(parts, padded, group=_process_group(group))
    return torch.cat([part[:number] for part, number in zip(parts, numbers, strict=True)])


def gather_values(value: Any, group: object) -> list[Any]:
    """Each process's value, by rank: anything that JSON can say."""
    _, size = rank_and_size(group)
    if size == 1:
        return [value]
    device = _device(group)
    data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(device)
    lengths = gather_rows(torch.tensor([len(data)], device=device), group).tolist()
    everything = gather_rows(data, group).cpu()
    return [json.loads(part.numpy().tobytes()) for part in everything.split(lengths)]


def together(prepare: Callable[[], T], group: object) -> T:
    """What `prepare` returns, once it has succeeded on all processes.

    Raises:
        UsageError: on all of them, where it was raised on one.
    """
    result, problem = None, ""
    try:
        result = prepare()
    except UsageError as error:
        problem = str(error)
    for rank, told in enumerate(gather_values(problem, group)):
        if told:
            raise UsageError(told if rank == 0 else f"{told} (rank {rank})")
    return cast(T, result)


def _device(group: object) -> torch.device:
    """Where the group's backend takes tensors: on the CPU if it can."""
    members: Any = _process_group(group) or dist.group.WORLD
    return torch.device("cpu" if torch_internals.has_cpu_backend(members) else "cuda")


def _process_group(group: object) -> dist.ProcessGroup | None:
    assert group is None or isinstance(group, dist.ProcessGroup)
    return group
