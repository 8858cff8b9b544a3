"""The contenders: CLIP's loss by megabatch, by dense expressions and by other libraries."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from machinery import truth

#: (x (b, d), y (n, d), scale (), and for a loss that has one: bias ()) -> loss ()
LossFunction = Callable[..., Tensor]


@dataclass(frozen=True)
class Contender:
    """One implementation. `load` imports its libraries; `needs`: a package that may be missing."""

    name: str
    load: Callable[[], LossFunction]
    needs: tuple[str, str] | None = None  #: (module, what pip calls it)
    cuda: bool = False  #: runs on CUDA only

    def installed(self) -> bool:
        """Whether its package is installed."""
        return self.needs is None or importlib.util.find_spec(self.needs[0]) is not None

    def runs_on(self, device: str) -> bool:
        """Whether it can be measured on this kind of device."""
        return self.installed() and (device == "cuda" or not self.cuda)


@dataclass(frozen=True)
class Loss:
    """A loss: its implementations, its exact value, and the work that no implementation avoids."""

    name: str
    contenders: dict[str, Contender]
    truth: Callable[..., truth.Truth]
    work: int  #: multiplications and additions, forward and backward, in units of m n d
    bias: float | None = None  #: of the logits, where the loss takes one


def _megabatch() -> LossFunction:
    from megabatch import ClipLoss

    return ClipLoss()


def _in_workspace(mebibytes: int) -> Callable[[], LossFunction]:
    """ClipLoss with blocks of the matrix that fill so much memory in half precision."""

    def loss(x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
        from megabatch.similarity import set_workspace

        before = set_workspace(mebibytes << 20)
        try:
            return _megabatch()(x, y, scale)  # its backward pass has the same workspace
        finally:
            set_workspace(before)

    return lambda: loss


def _dense() -> LossFunction:
    from megabatch.benchmarking.measure import dense_clip_loss

    return dense_clip_loss


# Other libraries' losses, each called as its documentation shows. All but open_clip's run on CUDA
# only. Those without a scale of their own get x times the scale, rounded to x's dtype.


def _openclip() -> LossFunction:
    """open_clip.ClipLoss, which forms the logits of each direction."""
    import open_clip

    return open_clip.ClipLoss()


def _inf_cl() -> LossFunction:
    """Inf-CL (arXiv 2410.17243): converts features to float32, products are in TF32."""
    from inf_cl import cal_inf_loss

    def loss(x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
        # Its argument `scale` runs a collective, which needs a process group.
        with torch.autocast(x.device.type, enabled=False):
            x, y = x.float(), y.float()
            value: Tensor = (cal_inf_loss(scale * x, y) + cal_inf_loss(scale * y, x)) / 2
            return value

    return loss


def _memeff() -> LossFunction:
    """memeff, which chooses its fastest kernels; its temperature is a number, without gradient."""
    from memeff import MemoryEfficientCLIPLoss

    made: list[torch.nn.Module] = []

    def loss(x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
        if not made:
            temperature = 1 / scale.item()
            made.append(MemoryEfficientCLIPLoss(temperature, normalized_inputs=True, stable=False))
        value: Tensor = made[0](x, y)
        return value

    return loss


def _liger() -> LossFunction:
    """Liger's linear cross-entropy, once for each direction."""
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    one_way = LigerFusedLinearCrossEntropyLoss()

    def loss(x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
        labels = torch.arange(len(x), device=x.device)
        return (one_way(y, scale * x, labels) + one_way(x, scale * y, labels)) / 2

    return loss


def _liger_cute() -> LossFunction:
    """Liger's fused kernels for Hopper, once for each direction; dW is summed in bfloat16."""
    from liger_kernel.ops import LigerFusedLinearScaledCrossEntropyFunction

    one_way = LigerFusedLinearScaledCrossEntropyFunction.apply

    def loss(x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
        labels = torch.arange(len(x), device=x.device)
        rows, columns = one_way(scale * x, y, labels), one_way(scale * y, x, labels)
        value: Tensor = (rows.mean() + columns.mean()) / 2
        return value

    return loss


def _cut_cross_entropy() -> LossFunction:
    """cut-cross-entropy, once for each direction.

    Without its filter, which drops probabilities that are small compared with 1 even if their sum
    is not: at the start of training, all negatives.
    """
    from cut_cross_entropy import linear_cross_entropy

    def loss(x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
        labels = torch.arange(len(x), device=x.device)
        rows = linear_cross_entropy(scale * x, y, labels, filter_eps=None)
        columns = linear_cross_entropy(scale * y, x, labels, filter_eps=None)
        return (rows + columns) / 2

    return loss


def compiled(load: Callable[[], LossFunction]) -> Callable[[], LossFunction]:
    """Under torch.compile for one size only, as in a training step."""
    return lambda: torch.compile(load(), dynamic=False)


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


def by_name(*contenders: Contender) -> dict[str, Contender]:
    """The contenders of a `Loss`."""
    return {contender.name: contender for contender in contenders}


#: MiB: blocks of 2,048 to 32,768 rows; the default, 512, is `megabatch`.
WORKSPACES = (8, 32, 128, 2048)

CLIP = Loss(
    "clip",
    by_name(
        Contender("megabatch", _megabatch),
        Contender("megabatch-compiled", compiled(_megabatch), cuda=True),
        Contender("megabatch-captured", captured(_megabatch), cuda=True),
        *(Contender(f"workspace {size} MiB", _in_workspace(size)) for size in WORKSPACES),
        Contender("dense", _dense),
        Contender("dense-compiled", compiled(_dense), cuda=True),
        Contender("dense-captured", captured(compiled(_dense)), cuda=True),
        Contender("openclip", _openclip, ("open_clip", "open_clip_torch")),
        Contender("inf-cl", _inf_cl, ("inf_cl", "inf-cl"), cuda=True),
        Contender("memeff", _memeff, ("memeff", "memeff"), cuda=True),
        Contender("liger", _liger, ("liger_kernel", "liger-kernel"), cuda=True),
        Contender("liger-cute", _liger_cute, ("cutlass", "liger-kernel[cutedsl]"), cuda=True),
        Contender(
            "cut-cross-entropy",
            _cut_cross_entropy,
            ("cut_cross_entropy", "cut-cross-entropy"),
            cuda=True,
        ),
    ),
    truth.clip,
    work=8,  # the matrix 2, the matrix again 2, its two products with the features 2 each
)
