"""Who is measured: losses, and for each the implementations that stand side by side."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megabatch.benchmarking import peers, truth
from megabatch.errors import UsageError

#: (x (b, d), y (n, d), scale (), and for a loss that has one: bias ()) -> loss ()
LossFunction = Callable[..., Tensor]


#: Bytes; room for all logits of 16,384 pairs in float32, which the backward pass then reuses.
KEEPING = 1152 << 20


@dataclass(frozen=True)
class Contender:
    """One implementation. `load` imports what it needs; `needs`: a package that may be missing."""

    name: str
    summary: str
    load: Callable[[], LossFunction]
    needs: tuple[str, str] | None = None  #: (module, what pip calls it)
    cuda: bool = False  #: runs on CUDA only

    def installed(self) -> bool:
        """Whether its package is here."""
        return self.needs is None or importlib.util.find_spec(self.needs[0]) is not None

    def runs_on(self, device: str) -> bool:
        """Whether it can be measured on this kind of device."""
        return self.installed() and (device == "cuda" or not self.cuda)


@dataclass(frozen=True)
class Loss:
    """One loss: its implementations, its exact value, and the work that none of them can avoid."""

    name: str
    contenders: dict[str, Contender]
    truth: Callable[..., truth.Truth]
    work: int  #: multiplications and additions, forward and backward, in units of m n d
    bias: float | None = None  #: of the logits, where the loss takes one

    def choose(self, names: tuple[str, ...], device: str) -> list[Contender]:
        """The contenders of these names; none given: all that run here.

        Raises:
            UsageError: a name is not known, given twice, or its package or device is missing.
        """
        if not names:
            return [c for c in self.contenders.values() if c.runs_on(device)]
        for name in names:
            if name not in self.contenders:
                known = ", ".join(self.contenders)
                raise UsageError(f"--contenders {name}: expected some of {known}")
            if names.count(name) > 1:
                raise UsageError(f"--contenders {name}: given {names.count(name)} times")
            contender = self.contenders[name]
            if contender.needs is not None and not contender.installed():
                raise UsageError(f"--contenders {name}: needs pip install {contender.needs[1]}")
            if not contender.runs_on(device):
                raise UsageError(f"--contenders {name}: needs --device cuda")
        return [self.contenders[name] for name in names]


def two_products(x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
    """Each direction's logits from a product of its own, the features scaled first."""
    images, texts = scale * x @ y.T, scale * y @ x.T
    labels = torch.arange(len(x), device=x.device)
    return (F.cross_entropy(images, labels) + F.cross_entropy(texts, labels)) / 2


def dense_siglip(x: Tensor, y: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    """SigLIP's loss from one matrix of logits."""
    z = scale * (x @ y.T) + bias
    wide = torch.promote_types(z.dtype, torch.float32)
    return (F.softplus(z.to(wide)).sum() - z.diagonal().to(wide).sum()) / len(x)


def _megabatch() -> LossFunction:
    from megabatch import ClipLoss

    return ClipLoss()


def _megabatch_keeping() -> LossFunction:
    from megabatch.similarity import set_workspace

    loss = _megabatch()

    def keeping(*inputs: Tensor) -> Tensor:
        before = set_workspace(KEEPING)
        try:
            return loss(*inputs)
        finally:
            set_workspace(before)  # of the contenders beside it, in the same process

    return keeping


def _dense() -> LossFunction:
    from megabatch.similarity.dense import clip_loss

    return clip_loss


def _megabatch_siglip() -> LossFunction:
    from megabatch import SigLipLoss

    return SigLipLoss()


def _megabatch_logsumexp() -> LossFunction:
    from megabatch.similarity import logsumexp

    return _means(logsumexp)


def _dense_logsumexp() -> LossFunction:
    from megabatch.similarity.dense import logsumexp

    return _means(logsumexp)


def _means(logsumexp: Callable[..., tuple[Tensor, Tensor | None]]) -> LossFunction:
    def loss(x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
        rows, columns = logsumexp(x, y, scale)
        assert columns is not None
        return rows.mean() + columns.mean()

    return loss


def _compiled(load: Callable[[], LossFunction]) -> Callable[[], LossFunction]:
    # For one size only, as a training step has it.
    return lambda: torch.compile(load(), dynamic=False)


def _graph(load: Callable[[], LossFunction]) -> Callable[[], LossFunction]:
    return lambda: torch.compile(load(), dynamic=False, mode="reduce-overhead")


def captured(load: Callable[[], LossFunction]) -> Callable[[], LossFunction]:
    """Forward and backward each as one CUDA graph, by torch.cuda.make_graphed_callables."""

    def made() -> LossFunction:
        loss = load()
        graphs: dict[object, LossFunction] = {}

        def call(*inputs: Tensor) -> Tensor:
            key = tuple((t.shape, t.dtype, t.requires_grad) for t in inputs)
            if key not in graphs:
                samples = tuple(t.detach().clone().requires_grad_(t.requires_grad) for t in inputs)
                dtype, enabled = torch.get_autocast_dtype("cuda"), torch.is_autocast_enabled("cuda")
                with torch.autocast("cuda", dtype, enabled, cache_enabled=False):  # or it refuses
                    graph: Any = torch.cuda.make_graphed_callables(lambda *a: loss(*a), samples)
                graphs[key] = graph
            return graphs[key](*inputs)

        return call

    return made


def _by_name(*contenders: Contender) -> dict[str, Contender]:
    return {contender.name: contender for contender in contenders}


CLIP = Loss(
    "clip",
    _by_name(
        Contender("megabatch", "megabatch.ClipLoss: tiles, no matrix", _megabatch),
        Contender("megabatch-keeping", "with a workspace of 1.125 GiB", _megabatch_keeping),
        Contender("megabatch-compiled", "under torch.compile", _compiled(_megabatch), cuda=True),
        Contender("megabatch-graph", "compiled to CUDA graphs", _graph(_megabatch), cuda=True),
        Contender(
            "megabatch-captured", "in a CUDA graph each way", captured(_megabatch), cuda=True
        ),
        Contender("dense", "one matrix, two cross-entropies", _dense),
        Contender("dense-compiled", "under torch.compile", _compiled(_dense), cuda=True),
        Contender("dense-graph", "compiled to CUDA graphs", _graph(_dense), cuda=True),
        Contender(
            "dense-captured",
            "compiled, in a CUDA graph each way",
            captured(_compiled(_dense)),
            cuda=True,
        ),
        Contender("two-products", "as OpenCLIP writes it: two matrices", lambda: two_products),
        Contender(
            "openclip", "open_clip.ClipLoss", peers.openclip, ("open_clip", "open_clip_torch")
        ),
        Contender("inf-cl", "one sweep a direction", peers.inf_cl, ("inf_cl", "inf-cl"), cuda=True),
        Contender("memeff", "stable=False", peers.memeff, ("memeff", "memeff"), cuda=True),
        Contender(
            "liger",
            "linear cross-entropy, twice",
            peers.liger,
            ("liger_kernel", "liger-kernel"),
            cuda=True,
        ),
        Contender(
            "cut-cross-entropy",
            "linear cross-entropy, twice, no filter",
            peers.cut_cross_entropy,
            ("cut_cross_entropy", "cut-cross-entropy"),
            cuda=True,
        ),
    ),
    truth.clip,
    work=8,  # the matrix 2, the matrix again 2, its two products with the features 2 each
)

SIGLIP = Loss(
    "siglip",
    _by_name(
        Contender("megabatch", "megabatch.SigLipLoss: one sweep", _megabatch_siglip),
        Contender("dense", "one matrix", lambda: dense_siglip),
        Contender(
            "dense-compiled", "under torch.compile", _compiled(lambda: dense_siglip), cuda=True
        ),
        Contender(
            "siglip-kernel",
            "strips, matrix products and a kernel",
            peers.siglip_kernel,
            ("siglip_kernel", "siglip-kernel"),
            cuda=True,
        ),
    ),
    truth.siglip,
    work=6,  # no second matrix: a pair's gradient needs no sum over others
    bias=-10.0,
)

LOGSUMEXP = Loss(
    "logsumexp",
    _by_name(
        Contender("megabatch", "megabatch.similarity.logsumexp", _megabatch_logsumexp),
        Contender("dense", "one matrix", _dense_logsumexp),
    ),
    truth.logsumexp,
    work=8,
)

LOSSES = {loss.name: loss for loss in (CLIP, SIGLIP, LOGSUMEXP)}
