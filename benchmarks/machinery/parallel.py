"""Losses over several processes: who is measured, and what is exact there.

Every contender is brought to one convention: the mean over ranks of what it returns is the global
mean loss, and so is, after the averaging that DDP does, every gradient.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from machinery.ranks import Team
from megabatch.benchmarking.contenders import LossFunction, captured
from megabatch.benchmarking.inputs import PERIOD, Case, features
from megabatch.similarity.distributed import gathered, ring
from megabatch.similarity.distributed.comm import Pending


@dataclass(frozen=True)
class Contender:
    """One implementation over several processes."""

    load: Callable[[Team], LossFunction]
    around: Callable[[], AbstractContextManager[None]] = nullcontext  #: in force while it runs
    needs: tuple[str, str] | None = None  #: (module, what pip calls it)
    cuda: bool = False  #: runs on CUDA only
    apart: bool = False  #: may break the process: in one of its own
    checked: bool = True  #: is meant to give the right result

    def absent(self, device: str) -> tuple[str, str] | None:
        """Status and note where it cannot be measured here."""
        if self.needs is not None and importlib.util.find_spec(self.needs[0]) is None:
            return "not installed", f"pip install {self.needs[1]}"
        return ("skipped", "needs CUDA") if self.cuda and device != "cuda" else None


def shard(case: Case, team: Team) -> tuple[Tensor, Tensor]:
    """This rank's rows of the features of all (`inputs.features`)."""
    whole = features(min(case.b, PERIOD), case.d, case.torch_dtype, case.device, case.features)
    rows = case.b // team.size
    first = team.rank * rows
    made = tuple(side.new_empty(rows, case.d) for side in whole)
    for side, source in zip(made, whole, strict=True):
        place = 0
        while place < rows:
            start = (first + place) % len(source)
            count = min(rows - place, len(source) - start)
            side[place : place + count] = source[start : start + count]
            place += count
    return made[0], made[1]


@contextlib.contextmanager
def without_overlap() -> Iterator[None]:
    """Every transfer is waited for before the computation that it could hide behind."""
    before = ring.set_overlap(False)
    try:
        yield
    finally:
        ring.set_overlap(before)


@contextlib.contextmanager
def gathering_up_to(size: int) -> Iterator[None]:
    """So many bytes of features are gathered; 0: pieces travel the ring, as of unequal shards."""
    before = ring.set_gather(size)
    try:
        yield
    finally:
        ring.set_gather(before)


in_turn = functools.partial(gathering_up_to, 0)
#: What would just fit into one round goes in five.
in_rounds = functools.partial(gathering_up_to, ring.DEFAULT_GATHER - 1)


@contextlib.contextmanager
def without_transfers() -> Iterator[None]:
    """The same computation, but no features are sent: a rank meets its own shard again and again.

    The result is wrong; the time is that of the computation alone. For equal shards.
    """
    with contextlib.ExitStack() as stack:
        still = _Still()
        for module, name, other in (
            (ring, "Swap", _StillSwap),
            (gathered, "gather", still.gather),
            (gathered, "scatter_sum", still.scatter_sum),
            (gathered, "deal", still.deal),
        ):
            stack.callback(setattr, module, name, getattr(module, name))
            setattr(module, name, other)
        yield


class _StillSwap(ring.Swap):
    def add(self, outgoing: Tensor, size: int, dim: int = 0) -> Tensor:
        assert outgoing.shape[dim] == size
        # Features are read and not written; gradients and states are added to.
        wide = outgoing.dtype in (torch.float32, torch.float64)
        return outgoing.clone() if wide else outgoing

    def start(self) -> None:
        pass

    def wait(self) -> None:
        pass


class _Here(Pending):
    """Nothing is under way."""

    def __init__(self) -> None:
        pass

    def wait(self) -> None:
        pass


class _Still:
    """What the collectives would return, of this rank's own."""

    def __init__(self) -> None:
        self.copies: dict[tuple[object, ...], Tensor] = {}

    def gather(self, shard: Tensor, group: Any, operation: str) -> tuple[Tensor, Pending]:
        key = (tuple(shard.shape), shard.dtype)  # made once: a transfer's writes cost no kernel
        if key not in self.copies:
            self.copies[key] = shard.expand(group.size(), *shard.shape).contiguous()
        return self.copies[key], _Here()

    def scatter_sum(self, parts: Tensor, group: Any, operation: str) -> tuple[Tensor, Pending]:
        return parts[: len(parts) // group.size()], _Here()

    def deal(self, parts: Tensor, group: Any, operation: str) -> Tensor:
        return parts


def _clip(team: Team) -> LossFunction:
    from megabatch import ClipLoss

    return ClipLoss(group=team.group)


def _clip_captured(team: Team) -> LossFunction:
    return captured(functools.partial(_clip, team))()


def _siglip(team: Team) -> LossFunction:
    from megabatch import SigLipLoss

    return SigLipLoss(group=team.group)


def _openclip(team: Team) -> LossFunction:
    """The two flags with which its gradients are right (its default gives the encoder 1/n)."""
    import open_clip

    return open_clip.ClipLoss(
        local_loss=True, gather_with_grad=True, rank=team.rank, world_size=team.size
    )


def _openclip_siglip(team: Team) -> LossFunction:
    from open_clip.loss import SigLipLoss

    loss: LossFunction = SigLipLoss(rank=team.rank, world_size=team.size)
    return loss


def _memeff(team: Team) -> LossFunction:
    """Its temperature is a number. A rank returns its part of the global mean, not its share."""
    from memeff import DistributedMemoryEfficientCLIPLoss

    made: list[torch.nn.Module] = []

    def loss(x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
        if not made:
            options = {"normalized_inputs": True, "stable": False, "group": team.group}
            made.append(DistributedMemoryEfficientCLIPLoss(1 / scale.item(), **options))
        value: Tensor = team.size * made[0](x, y)
        return value

    return loss


def _inf_cl(team: Team) -> LossFunction:
    """Inf-CL (arXiv 2410.17243). Its kernels compute in float32/TF32 whatever comes."""
    from inf_cl import cal_inf_loss

    def loss(x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            x, y = x.float(), y.float()
            value: Tensor = (cal_inf_loss(x, y, scale=scale) + cal_inf_loss(y, x, scale=scale)) / 2
            return value

    return loss


def _siglip_kernel(team: Team) -> LossFunction:
    """siglip-kernel's ring."""
    from siglip_kernel import DistributedSigLIPLoss

    loss: LossFunction = DistributedSigLIPLoss(
        strategy="ring", rank=team.rank, world_size=team.size, process_group=team.group
    )
    return loss


#: Loss, then contender. Those of open_clip and Inf-CL know only the group of all processes.
PARALLEL: dict[str, dict[str, Contender]] = {
    "clip": {
        "megabatch": Contender(_clip),
        "megabatch-captured": Contender(_clip_captured, cuda=True),
        "megabatch-ring": Contender(_clip, in_turn),
        "megabatch-rounds": Contender(_clip, in_rounds),
        "megabatch-no-overlap": Contender(_clip, without_overlap),
        "megabatch-no-transfers": Contender(_clip, without_transfers, checked=False),
        "openclip": Contender(_openclip, needs=("open_clip", "open_clip_torch")),
        "memeff": Contender(_memeff, needs=("memeff", "memeff"), cuda=True, apart=True),
        "inf-cl": Contender(_inf_cl, needs=("inf_cl", "inf-cl"), cuda=True, apart=True),
    },
    "siglip": {
        "megabatch": Contender(_siglip),
        "megabatch-ring": Contender(_siglip, in_turn),
        "megabatch-rounds": Contender(_siglip, in_rounds),
        "megabatch-no-overlap": Contender(_siglip, without_overlap),
        "megabatch-no-transfers": Contender(_siglip, without_transfers, checked=False),
        "openclip": Contender(_openclip_siglip, needs=("open_clip", "open_clip_torch")),
        "siglip-kernel": Contender(
            _siglip_kernel, needs=("siglip_kernel", "siglip-kernel"), cuda=True, apart=True
        ),
    },
}
