"""Communication between the ranks of a group, apart from the similarity engine's own transfers.

Numbers and small values go from host to host over the group's control channel, the one that the
engine's handshakes use, and wait for no device. Only `all_gather_rows` moves tensors. A `group` is
None for the default group if there is one, a process group, or "local". A rank that is gone or does
not come in time is a `CommunicationError`.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from megabatch.errors import CommunicationError, UsageError, one_line
from megabatch.similarity.distributed import comm, control
from megabatch.similarity.distributed.comm import group_name, rank_and_size

T = TypeVar("T")

#: Numbers that one handshake carries.
_NUMBERS = 8
#: Bytes per exchange. The buffer of a local socket holds several (208 KiB on Linux), so no rank
#: waits in `send` for one that is itself sending.
_CHUNK = 1 << 15


class Gone(UsageError):
    """Another process died, left or did not come in time."""

    exit_code = 1  # not a mistake in the command


@contextmanager
def lost_rank_told(stage: str, rank: int, size: int, within: str) -> Iterator[None]:
    """Turn a failed communication into `Gone`, one line that names this rank and the stage.

    `within`: a description of the time that other ranks have.
    """
    try:
        yield
    except RuntimeError as error:
        known = isinstance(error, (CommunicationError, dist.DistError))
        # Gloo raises plain RuntimeErrors.
        words = ("gloo", "nccl", "connection closed", "timed out waiting")
        if size == 1 or not (known or any(word in str(error).lower() for word in words)):
            raise
        raise Gone(
            f"rank {rank} of {size}, {stage}: another process is gone, or did not respond within "
            f"{within}: {one_line(error, 400)}"
        ) from error


def is_first(group: object = None) -> bool:
    """Whether this process is rank 0 of the group, which prints and writes."""
    return rank_and_size(group)[0] == 0


def global_ranks(group: object) -> list[int]:
    """The global ranks of a group's members; [0] without a group."""
    name = group_name(group)
    return dist.get_process_group_ranks(comm.resolve(name)) if name else [0]


def local_range(n: int, group: object, *, block: int = 1) -> range:
    """This rank's part of `range(n)`: contiguous, and made of whole blocks but for the last one.

    The parts of all ranks cover `range(n)` once. Where every product is computed on whole blocks,
    its shape does not depend on the number of ranks, and neither do results, to the last digit.
    """
    (rank, size), blocks = rank_and_size(group), -(-n // block)
    start, stop = (min(n, block * (blocks * r // size)) for r in (rank, rank + 1))
    return range(start, stop)


def all_gather_rows(rows: Tensor, group: object) -> Tensor:
    """The rows of all ranks, concatenated in the order of ranks.

    Args:
        rows: (m, ...); m may differ between ranks, other sizes, dtype and device type may not.
    """
    counts = all_gather_values(len(rows), group)
    if len(counts) == 1:
        return rows
    members = comm.resolve(group_name(group))
    padded = rows.new_zeros(max(counts), *rows.shape[1:])  # backends expect equal sizes
    padded[: len(rows)] = rows
    parts = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(parts, padded, group=members)
    return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])


def all_gather_values(value: Any, group: object) -> list[Any]:
    """Every rank's value, by rank; anything that JSON can represent."""
    name = group_name(group)
    if not name:
        return [value]
    data = json.dumps(value).encode()
    with comm.failures_of(f"gathering values from all ranks, rank {dist.get_rank()}"):
        channel = control.channel(comm.resolve(name), _device(name))
        sizes = channel.gather(len(data).to_bytes(8, "little"))
        most = max(int.from_bytes(size, "little") for size in sizes)
        chunks = [
            channel.gather(data[start : start + _CHUNK].ljust(min(_CHUNK, most - start)))
            for start in range(0, most, _CHUNK)
        ]
    return [json.loads(b"".join(parts)) for parts in zip(*chunks, strict=True)]


def all_gather_numbers(call: str, numbers: Sequence[int], group: object) -> list[list[int]]:
    """Every rank's numbers, by rank, after checking that all ranks make the same call.

    Args:
        call: a description of the call.
        numbers: int64, as many on each rank.

    Raises:
        ValueError: a rank makes another call; the message names the ranks.
    """
    name = group_name(group)
    if not name:
        return [list(numbers)]
    tables = [
        comm.agree(name, call, numbers[start : start + _NUMBERS], _device(name))
        for start in range(0, max(1, len(numbers)), _NUMBERS)
    ]
    return [list(itertools.chain(*rows)) for rows in zip(*tables, strict=True)]


def on_all_ranks(work: Callable[[], T], group: object) -> T:
    """The result of `work()` on this rank, once it has succeeded on all ranks.

    Raises:
        UsageError: on all ranks, if it was raised on one.
    """
    result, error = None, None
    try:
        result = work()
    except UsageError as caught:
        error = caught
    raise_on_all_ranks(error, group)
    return cast(T, result)


def raise_on_all_ranks(error: UsageError | None, group: object) -> None:
    """Return on all ranks, or raise on all the error of the first rank that has one.

    Raises:
        UsageError: with that error's exit code; its message names the rank, unless it is 0.
    """
    told = all_gather_values(error and (error.exit_code, str(error)), group)
    rank = next((rank for rank, one in enumerate(told) if one is not None), None)
    if rank is None:
        return
    if error is not None and rank == 0 and is_first(group):
        raise error
    common = UsageError(told[rank][1] if rank == 0 else f"rank {rank}: {told[rank][1]}")
    common.exit_code = told[rank][0]
    raise common


def _device(name: str) -> torch.device:
    """A device of the group's backends; the CPU if it has one for it."""
    return torch.device("cpu" if control.has_cpu_backend(comm.resolve(name)) else "cuda")
