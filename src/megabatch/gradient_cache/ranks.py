"""What the ranks that take part in a step tell each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from megabatch.similarity.distributed.comm import agree, group_name, resolve

#: Numbers that one exchange takes.
AT_ONCE = 8


def ranks_of(group: Any) -> list[int]:
    """The global ranks that belong to a group; only this process's for "local", or alone."""
    name = group_name(group)
    return torch.distributed.get_process_group_ranks(resolve(name)) if name else [0]


def told_by_all(call: str, numbers: Sequence[int], group: Any) -> list[list[int]]:
    """Every rank's numbers, by rank in the group; this process's alone, or for "local".

    Hosts tell each other; no device is waited for.

    Args:
        call: what all ranks are calling, in words.
        numbers: as many on each rank.
        group: as GradientCache takes it.

    Raises:
        ValueError: a rank calls something else; it names the ranks.
        CommunicationError: a rank is gone or does not come.
    """
    name = group_name(group)
    if not name:
        return [list(numbers)]
    on_gpu = torch.distributed.get_backend(resolve(name)) == "nccl"
    device = torch.device("cuda" if on_gpu else "cpu")
    table = agree(name, call, numbers[:AT_ONCE], device)
    for start in range(AT_ONCE, len(numbers), AT_ONCE):
        more = agree(name, call, numbers[start : start + AT_ONCE], device)
        table = [[*row, *others] for row, others in zip(table, more, strict=True)]
    return table
