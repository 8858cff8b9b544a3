"""Whether what every rank should hold alike is alike."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megabatch.errors import UsageError
from megabatch.training.world import World


class ReplicasDiffer(UsageError):
    """Parameters that the ranks should share have drifted apart: no gradient was right since."""

    exit_code = 1  # not a mistake in the command


def check_replicas(module: nn.Module, world: World) -> None:
    """Compare parameters and buffers over the ranks, bit by bit, by one checksum each.

    Costs one pass over them and one reduction of a number a tensor. Left out are FSDP2's shards,
    which no two ranks share, and running statistics, which each rank gathers from its own samples.

    Raises:
        ReplicasDiffer: on every rank; names the tensors and the ranks that disagree.
    """
    tensors = _replicated(module)
    if world.size == 1 or not tensors:
        return
    sums = torch.stack([_checksum(tensor) for tensor in tensors.values()])
    # One reduction for the largest and the smallest.
    largest, smallest = both = torch.stack([sums, -sums])
    with world.failures("comparing replicas"):
        dist.all_reduce(both, dist.ReduceOp.MAX)
    differ = (largest != -smallest).nonzero().flatten().tolist()
    if not differ:
        return
    table = [torch.empty_like(sums) for _ in range(world.size)]
    dist.all_gather(table, sums)
    names = list(tensors)
    shown = [f"{names[i]} ({_camps([int(row[i]) for row in table])})" for i in differ[:5]]
    more = f" and {len(differ) - 5} more" if len(differ) > 5 else ""
    raise ReplicasDiffer(f"parameters differ between ranks: {', '.join(shown)}{more}")


def _replicated(module: nn.Module) -> dict[str, Tensor]:
    own = {
        f"{prefix}.{name}" if prefix else name
        for prefix, part in module.named_modules()
        if getattr(part, "track_running_stats", False)
        for name, _ in part.named_buffers(recurse=False)
    }
    named = [*module.named_parameters(), *module.named_buffers()]
    return {
        name: tensor.detach()
        for name, tensor in named
        if name not in own and not isinstance(tensor, DTensor) and tensor.numel()
    }


def _checksum(tensor: Tensor) -> Tensor:
    """An int64 that another bit, or two values that change places, will most likely change."""
    bits = tensor.contiguous().flatten().view(torch.uint8)
    width = next(size for size in (4, 2, 1) if bits.numel() % size == 0)
    words = bits.view({4: torch.int32, 2: torch.int16, 1: torch.uint8}[width]).long()
    places = torch.arange(1, len(words) + 1, device=words.device)
    return (words * places).sum() & ((1 << 62) - 1)


def _camps(sums: list[int]) -> str:
    ranks: dict[int, list[str]] = {}
    for rank, value in enumerate(sums):
        ranks.setdefault(value, []).append(str(rank))
    return " against ".join(
        f"rank{'s' if len(who) > 1 else ''} {', '.join(who)}" for who in ranks.values()
    )
