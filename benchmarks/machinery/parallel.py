"""Contenders over several processes.

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
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from machinery.contenders import LossFunction, captured
from machinery.inputs import PERIOD, Case, features
from machinery.ranks import Team
from megabatch.similarity import settings
from megabatch.similarity.distributed import layout
from megabatch.similarity.distributed.comm import Pending


@dataclass(frozen=True)
class Contender:
    """One implementation over several processes."""

    load: Callable[[Team], LossFunction]
    around: Callable[[], AbstractContextManager[None]] = nullcontext  #: entered while it runs
    needs: tuple[str, str] | None = None  #: (module, what pip calls it)
    cuda: bool = False  #: runs on CUDA only
    own_processes: bool = False  #: may break its processes, which run no others
    checked: bool = True  #: its result should be right

    def absent(self, device: str) -> tuple[str, str] | None:
        """Status and note if it cannot be measured here."""
        if self.needs is not None and importlib.util.find_spec(self.needs[0]) is None:
            return "not installed", f"pip install {self.needs[1]}"
        return ("skipped", "needs CUDA") if self.cuda and device != "cuda" else None


def shard(case: Case, team: Team) -> tuple[Tensor, Tensor]:
    """This rank's rows of the global features (`inputs.features`)."""
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
    """Wait for every transfer before the computation that it could overlap with."""

    def ended(begin: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            transfer = begin(*arguments)
            transfer.wait()
            return transfer

        return call

    with contextlib.ExitStack() as stack:
        for name in ("gather", "sum"):
            begin = getattr(layout.Layout, name)
            stack.callback(setattr, layout.Layout, name, begin)
            setattr(layout.Layout, name, ended(begin))
        yield


@contextlib.contextmanager
def gathering_up_to(size: int) -> Iterator[None]:
    """Gather at most this many bytes of features at once."""
    before = settings.set_gather(size)
    try:
        yield
    finally:
        settings.set_gather(before)


#: Five rounds for features that would just fit into one.
in_rounds = functools.partial(gathering_up_to, settings.DEFAULT_GATHER - 1)


@contextlib.contextmanager
def without_transfers() -> Iterator[None]:
    """The same computation without transfers: a rank processes its own shard repeatedly.

    The result is wrong; the time is that of the computation alone. For equal shards.
    """
    with contextlib.ExitStack() as stack:
        local = _LocalCollectives()
        for name in ("all_gather", "reduce_scatter", "all_to_all"):
            stack.callback(setattr, layout, name, getattr(layout, name))
            setattr(layout, name, getattr(local, name))
        yield


class _LocalCollectives:
    """Collectives that return this rank's own data."""

    def __init__(self) -> None:
        self.copies: dict[tuple[object, ...], Tensor] = {}

    def all_gather(
        self, shard: Tensor, group: Any, operation: str, out: Tensor | None = None
    ) -> Pending:
        # Cached, as a real transfer launches no kernel.
        key = tuple(shard.shape), shard.dtype
        if key not in self.copies:
            self.copies[key] = shard.expand(group.size(), *shard.shape).contiguous()
        return Pending(self.copies[key])

    def reduce_scatter(self, parts: Tensor, group: Any, operation: str) -> Pending:
        return Pending(parts[: len(parts) // group.size()])

    def all_to_all(self, parts: Tensor, group: Any, operation: str) -> Tensor:
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
    """With the two flags that make its gradients right (by default the encoder's are 1/n of it)."""
    import open_clip

    return open_clip.ClipLoss(
        local_loss=True, gather_with_grad=True, rank=team.rank, world_size=team.size
    )


class _DiscoGather(torch.autograd.Function):
    """DisCo-CLIP's gathering (arXiv 2304.08480): every rank's gradient of all rows is all-reduced.

    Its release averages these gradients, which makes them 1/n of the right ones under DDP; here
    they are summed.
    """

    @staticmethod
    def forward(ctx: Any, shard: Tensor, team: Team) -> Tensor:
        ctx.team = team
        parts = [torch.empty_like(shard) for _ in range(team.size)]
        dist.all_gather(parts, shard.contiguous(), group=team.group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        whole = gradient.contiguous()
        dist.all_reduce(whole, group=ctx.team.group)
        return whole.chunk(ctx.team.size)[ctx.team.rank], None


def _disco_clip(team: Team) -> LossFunction:
    """Own rows against all gathered ones, a product for each direction."""

    def loss(x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
        images, texts = (_DiscoGather.apply(side, team) for side in (x, y))
        own = slice(team.rank * len(x), (team.rank + 1) * len(x))
        labels = torch.arange(own.start, own.stop, device=x.device)
        rows, columns = scale * images[own] @ texts.T, scale * texts[own] @ images.T
        return (F.cross_entropy(rows, labels) + F.cross_entropy(columns, labels)) / 2

    return loss


def _openclip_siglip(team: Team) -> LossFunction:
    from open_clip.loss import SigLipLoss

    loss: LossFunction = SigLipLoss(rank=team.rank, world_size=team.size)
    return loss


def _memeff(team: Team) -> LossFunction:
    """Its temperature is a number; each rank returns its part of the global mean, scaled here."""
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
    """Inf-CL (arXiv 2410.17243), whose kernels always compute in float32/TF32."""
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


#: By loss and contender. Those of open_clip and Inf-CL support only the default process group.
PARALLEL: dict[str, dict[str, Contender]] = {
    "clip": {
        "megabatch": Contender(_clip),
        "megabatch-captured": Contender(_clip_captured, cuda=True),
        "megabatch-rounds": Contender(_clip, in_rounds),
        "megabatch-no-overlap": Contender(_clip, without_overlap),
        "megabatch-no-transfers": Contender(_clip, without_transfers, checked=False),
        "openclip": Contender(_openclip, needs=("open_clip", "open_clip_torch")),
        "disco-clip": Contender(_disco_clip),
        "memeff": Contender(_memeff, needs=("memeff", "memeff"), cuda=True, own_processes=True),
        "inf-cl": Contender(_inf_cl, needs=("inf_cl", "inf-cl"), cuda=True, own_processes=True),
    },
    "siglip": {
        "megabatch": Contender(_siglip),
        "megabatch-rounds": Contender(_siglip, in_rounds),
        "megabatch-no-overlap": Contender(_siglip, without_overlap),
        "megabatch-no-transfers": Contender(_siglip, without_transfers, checked=False),
        "openclip": Contender(_openclip_siglip, needs=("open_clip", "open_clip_torch")),
        "siglip-kernel": Contender(
            _siglip_kernel, needs=("siglip_kernel", "siglip-kernel"), cuda=True, own_processes=True
        ),
    },
}
