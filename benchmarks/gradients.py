"""Who trains with which gradient under DistributedDataParallel.

    pip install -e '.[dev,peers]'
    pip install --no-deps gradcache nemo-automodel pylate
    python benchmarks/gradients.py --output benchmarks/results/gradients.json

Four processes (Gloo, float64) share a batch of a two-tower encoder, after 100 steps of training,
and call each library's loss as its documentation or trainer does. After DDP's mean,
`encoder_factor` and `scale_factor` are <g, g*> / <g*, g*>, where g* is the gradient of the whole
batch in one process, `cosine` is the encoder's cos(g, g*). 1 is right. A loss whose package needs
CUDA, or does not import here, is defined anew (`source`: "definition", with a version or commit);
what is missing is "not installed".
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_gather_tensor_autograd
from torch.nn.parallel import DistributedDataParallel

import megabatch as mb
from machinery import ranks
from megabatch.benchmarking import records

RANKS, BATCH, INPUTS, WIDTH, SCALE, STEPS = 4, 64, 24, 8, 10.0, 100
BIAS = torch.tensor(-2.0, dtype=torch.float64)

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]  #: of x, y, scale
Step = Callable[[nn.Module, Tensor, Tensor], Any]  #: of model, images, texts: leaves gradients


class Towers(nn.Module):
    """Two linear encoders of unit vectors, in one weight, and a logit scale."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, INPUTS, WIDTH, dtype=torch.float64))
        self.logit_scale = nn.Parameter(torch.tensor(SCALE, dtype=torch.float64).log())

    def forward(self, image: Tensor | None = None, text: Tensor | None = None) -> dict[str, Tensor]:
        """The features of the given sides, and the scale, named as by OpenCLIP's models."""
        sides = zip(("image", "text"), (image, text), self.weight, strict=True)
        found = {f"{name}_features": F.normalize(t @ w) for name, t, w in sides if t is not None}
        return found | {"logit_scale": self.logit_scale.exp()}


# --- the losses, as one process computes them -----------------------------------------------------


def infonce(x: Tensor, y: Tensor, scale: Tensor, first: int = 0) -> Tensor:
    """Positives of rows of x are the rows of y from `first` on."""
    return F.cross_entropy(scale * x @ y.T, torch.arange(first, first + len(x)))


def clip(x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
    return (infonce(x, y, scale) + infonce(y, x, scale)) / 2


def siglip(x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
    return -F.logsigmoid((2 * torch.eye(len(x)) - 1) * (scale * x @ y.T + BIAS)).sum() / len(x)


def nt_xent(x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
    z = torch.cat([x, y])
    logits = (scale * z @ z.T).masked_fill(torch.eye(len(z), dtype=torch.bool), -torch.inf)
    return F.cross_entropy(logits, torch.arange(len(z)).roll(len(x)))


# --- the libraries --------------------------------------------------------------------------------


def after(loss: Callable[..., Tensor], **options: Any) -> Step:
    """A step with a loss of this rank's features and the scale."""
    return lambda model, image, text: loss(*model(image, text).values(), **options).backward()


def gradient_cache(model: nn.Module, image: Tensor, text: Tensor) -> None:
    mb.GradientCache(model, mb.ClipLoss(), micro_batch_size=5)(image, text).backward()


def place() -> dict[str, int]:
    """As OpenCLIP's losses take it."""
    return {"rank": dist.get_rank(), "world_size": dist.get_world_size()}


def openclip(*inputs: Tensor, **flags: bool) -> Tensor:
    return resolve_name("open_clip.loss:ClipLoss")(**flags, **place())(*inputs)


def openclip_siglip(*inputs: Tensor, exchange: str) -> Tensor:
    return resolve_name("open_clip.loss:SigLipLoss")(dist_impl=exchange, **place())(*inputs, BIAS)


def openclip_trainer(model: nn.Module, image: Tensor, text: Tensor, m: int) -> None:
    """Its loop with the batch in m parts, and an optimizer that changes nothing."""
    arguments = argparse.Namespace(
        device="cpu", precision="fp64", accum_freq=m, distill=False, skip_scheduler=True,
        grad_clip_norm=None, horovod=False, batch_size=len(image) // m, log_every_n_steps=1,
        wandb=False, local_rank=dist.get_rank(), **place(),
    )  # fmt: skip
    loader = type("Loader", (list,), {"num_batches": m, "num_samples": len(image)})
    parts = loader(zip(image.chunk(m), text.chunk(m), strict=True))
    data = {"train": SimpleNamespace(set_epoch=int, dataloader=parts)}
    loss = resolve_name("open_clip.loss:ClipLoss")(True, True, **place())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    train = resolve_name("open_clip_train.train:train_one_epoch")
    train(model, data, loss, 0, optimizer, None, None, None, arguments)


def ranking(model: nn.Module, image: Tensor, text: Tensor, name: str, **options: int) -> None:
    """sentence-transformers; its trainer, too, gives the loss the model under DDP afterwards."""
    made = resolve_name(f"sentence_transformers.sentence_transformer.losses:{name}")
    loss = made([None], SCALE, gather_across_devices=True, **options)
    loss.model = lambda side: {"sentence_embedding": next(iter(model(**side).values()))}
    loss([{"image": image}, {"text": text}], None).backward()


def lightly(x: Tensor, y: Tensor, _: Tensor) -> Tensor:
    return resolve_name("lightly.loss:NTXentLoss")(1 / SCALE, gather_distributed=True)(x, y)


def metric_learning(x: Tensor, y: Tensor, _: Tensor, efficient: bool = False) -> Tensor:
    loss = resolve_name("pytorch_metric_learning.losses:NTXentLoss")(1 / SCALE)
    wrapper = resolve_name("pytorch_metric_learning.utils.distributed:DistributedLossWrapper")
    labels = (dist.get_rank() * len(x) + torch.arange(len(x))).repeat(2)
    return wrapper(loss, efficient)(torch.cat([x, y]), labels)


def grad_cache(x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
    """Its loss takes no scale, which therefore is the encoder's."""
    return resolve_name("gradcache.loss:DistributedContrastiveLoss")()(scale * x, y)


def nemo(x: Tensor, y: Tensor, scale: Tensor, keep: bool) -> Tensor:
    """Its recipe's loss, with its gathering."""
    utilities = "nemo_automodel.components.models.common.inbatch_neg_utils"
    gathered = resolve_name(f"{utilities}:dist_gather_tensor")(y, preserve_grad=keep)
    return infonce(x, gathered, scale, dist.get_rank() * len(x))


def pylate(x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
    """`Contrastive` for texts of one token, with its gathering."""
    gathered = torch.cat(resolve_name("pylate.utils:all_gather_with_gradients")(y))
    return infonce(x, gathered, scale, dist.get_rank() * len(x)) * dist.get_world_size()


def inf_cl(x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
    """Its ring in float32 without its kernels, which need CUDA."""
    ring = partial(resolve_name("inf_cl:cal_ring_loss"), scale=scale, head_dim=WIDTH)
    return (ring(x, y) + ring(y, x)) / 2


# --- definitions ----------------------------------------------------------------------------------


def whole(x: Tensor) -> Tensor:
    """All ranks' rows, whose gradients are summed over ranks."""
    return all_gather_tensor_autograd(x, 0, dist.group.WORLD)


def own(x: Tensor) -> Tensor:
    """All ranks' rows, of which only this rank's have a gradient."""
    parts = list(whole(x).detach().split(len(x)))
    parts[dist.get_rank()] = x
    return torch.cat(parts)


def flag_embedding(x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
    return infonce(own(x), own(y), scale)


def tevatron(x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
    return infonce(own(x), own(y), scale) * dist.get_world_size()


def memeff(x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
    """A rank's part of the mean over all rows (`stable=False`)."""
    n, first = dist.get_world_size(), dist.get_rank() * len(x)
    return (infonce(x, whole(y), scale, first) + infonce(y, whole(x), scale, first)) / 2 / n


def disco_clip(x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
    """Gradients of gathered rows are averaged over ranks. (Its README adds the directions up.)"""
    n, rows = dist.get_world_size(), slice(dist.get_rank() * len(x), (dist.get_rank() + 1) * len(x))
    xs, ys = (side / n + (side - side / n).detach() for side in (whole(x), whole(y)))
    return (infonce(xs[rows], ys, scale, rows.start) + infonce(ys[rows], xs, scale, rows.start)) / 2


def contenders() -> list[tuple[Any, ...]]:
    """Arguments of `measure`, in the order of the table."""
    oc, st, pml = "open_clip_torch", "sentence-transformers", "pytorch-metric-learning"
    nemo_source, name = "nemo-automodel", "MultipleNegativesRankingLoss"
    cached = partial(ranking, name=f"Cached{name}", mini_batch_size=5)
    both = {"local_loss": True, "gather_with_grad": True}
    return [
        ("megabatch `ClipLoss`", "megabatch", clip, after(mb.ClipLoss())),
        ("megabatch `GradientCache`", "megabatch", clip, gradient_cache),
        ("OpenCLIP, both flags", oc, clip, after(openclip, **both)),
        ("OpenCLIP, `--gather-with-grad`", oc, clip, after(openclip, gather_with_grad=True)),
        ("OpenCLIP, `--local-loss`", oc, clip, after(openclip, local_loss=True)),
        ("OpenCLIP, neither (default)", oc, clip, after(openclip)),
        ("OpenCLIP, both, `--accum-freq 2`", oc, clip, partial(openclip_trainer, m=2)),
        ("OpenCLIP SigLIP, `bidir`", oc, siglip, after(openclip_siglip, exchange="bidir")),
        ("OpenCLIP SigLIP, `shift`", oc, siglip, after(openclip_siglip, exchange="shift")),
        ("OpenCLIP SigLIP, `reduce`", oc, siglip, after(openclip_siglip, exchange="reduce")),
        ("OpenCLIP SigLIP, `gather`", oc, siglip, after(openclip_siglip, exchange="gather")),
        (st, st, infonce, partial(ranking, name=name), False),
        (f"{st}, cached", st, infonce, cached, False),
        ("PyLate", "pylate", infonce, after(pylate)),
        ("lightly", "lightly", nt_xent, after(lightly), False),
        (f"{pml} (default)", pml, nt_xent, after(metric_learning), False),
        (f"{pml}, `efficient`", pml, nt_xent, after(metric_learning, efficient=True), False),
        ("NeMo Automodel (default)", nemo_source, infonce, after(nemo, keep=False)),
        ("NeMo Automodel, not detached", nemo_source, infonce, after(nemo, keep=True)),
        ("FlagEmbedding", "definition, 1.4.2", infonce, after(flag_embedding)),
        ("tevatron", "definition, dd06310", infonce, after(tevatron)),
        ("GradCache", "gradcache", infonce, after(grad_cache)),
        ("DisCo-CLIP", "definition, f00737d", clip, after(disco_clip)),
        ("Inf-CL", "inf-cl", clip, after(inf_cl)),
        ("memeff", "definition, 0.3.1", clip, after(memeff), False),
    ]


# --- measuring ------------------------------------------------------------------------------------


def problem(exact: Loss, learnt: bool) -> tuple[Towers, list[Tensor]]:
    """Half-trained towers and the whole batch's two sides, the same at every call."""
    torch.manual_seed(0)
    model, image = Towers(), torch.randn(BATCH, INPUTS, dtype=torch.float64)
    sides = [image, image + torch.randn(BATCH, INPUTS, dtype=torch.float64)]
    optimizer = torch.optim.Adam([model.weight], 0.02)
    for _ in range(STEPS):
        optimizer.zero_grad()
        after(exact)(model, *sides)
        optimizer.step()
    model.zero_grad()
    model.logit_scale.requires_grad_(learnt)
    return model, sides


def factor(found: Tensor, right: Tensor) -> float:
    return (torch.sum(found * right) / right.square().sum()).item()


def compare(exact: Loss, step: Step, learnt: bool) -> dict[str, Any]:
    """The status and the figures of one way to train."""
    right, sides = problem(exact, learnt)
    after(exact)(right, *sides)
    found, _ = problem(exact, learnt)
    shard = [side.chunk(dist.get_world_size())[dist.get_rank()] for side in sides]
    step(DistributedDataParallel(found), *shard)
    pair = found.weight.grad, right.weight.grad
    cosine = F.cosine_similarity(*(gradient.flatten() for gradient in pair), dim=0).item()
    figures = {"encoder_factor": factor(*pair), "cosine": cosine}
    if learnt:
        figures["scale_factor"] = factor(found.logit_scale.grad, right.logit_scale.grad)
    wrong = max(abs(figure - 1) for figure in figures.values()) > 1e-6
    return {"status": "wrong" if wrong else "ok", **figures}


def measure(name: str, source: str, exact: Loss, step: Step, learnt: bool = True) -> dict[str, Any]:
    """A record. `source`: what pip calls the package, or where the definition is from.

    `exact`: the loss of the whole batch; `learnt`: its scale is, and not a number.
    """
    about: dict[str, Any] = {"contender": name, "source": source, "loss": exact.__name__}
    about |= {"device": "cpu", "n_devices": dist.get_world_size()}
    about |= {"dtype": "float64", "b": BATCH, "d": WIDTH}
    try:
        if "definition" not in source:
            about["source"] += f" {version(source)}"
        return about | compare(exact, step, learnt)
    except ModuleNotFoundError as error:
        return about | {"status": "not installed", "note": str(error)}
    except Exception as error:
        return about | {"status": "failed", "note": f"{type(error).__name__}: {error}"[:300]}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/gradients.json"))
    output = parser.parse_args().output
    if "RANK" not in os.environ:
        ranks.start_others(RANKS, [sys.executable, *sys.argv])
    warnings.simplefilter("ignore")  # the libraries'
    ranks.join("cpu", [RANKS])
    found = [measure(*one) for one in contenders()]
    if dist.get_rank() == 0:
        for one in found:
            print(*one.values())
        records.write(output, records.command_line(output), found)
    ranks.leave()


if __name__ == "__main__":
    main()
