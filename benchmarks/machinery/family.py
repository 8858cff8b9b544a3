"""The losses other than CLIP's and SigLIP's: with masks, self-similar, supervised, with a teacher.

Ids and labels are random, the same every time. NT-Xent and the supervised loss take x and y as the
two views of 2 b rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from machinery import exact
from machinery.contenders import (
    CLIP,
    Contender,
    Loss,
    LossFunction,
    by_name,
    compiled,
)
from machinery.inputs import features
from machinery.truth import Truth

#: Number of classes of the supervised loss.
CLASSES = 1000
#: Share of rows with another row's id.
DUPLICATES = 0.1
MARGIN = 0.1
#: The teacher's logit scale.
FACTOR = 50.0


@functools.lru_cache(maxsize=8)
def labels(n: int, kinds: int, device: str) -> Tensor:
    """(n,) int64."""
    generator = torch.Generator(device).manual_seed(2)
    return torch.randint(kinds, (n,), generator=generator, device=device)


@functools.lru_cache(maxsize=8)
def _duplicates(n: int, device: str) -> Tensor:
    other = labels(n, n, device)
    generator = torch.Generator(device).manual_seed(3)
    copied = torch.rand(n, generator=generator, device=device) < DUPLICATES
    return torch.where(copied, other, torch.arange(n, device=device))


def duplicates(x: Tensor) -> Tensor:
    """Ids: each row's own number, for some rows another row's."""
    return _duplicates(len(x), x.device.type)


@functools.lru_cache(maxsize=1)
def _teacher(n: int, d: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    return features(n, d, dtype, device, "trained")


def teacher(x: Tensor) -> tuple[Tensor, Tensor]:
    """A teacher's features of the pairs, as wide as the student's."""
    return _teacher(*x.shape, x.dtype, x.device.type)


def classes(x: Tensor) -> Tensor:
    """A label for each instance, the same for both views."""
    return labels(len(x), CLASSES, x.device.type).repeat(2)


def instances(x: Tensor) -> Tensor:
    """The instance of each row of two views."""
    return torch.arange(len(x), device=x.device).repeat(2)


# --- ours -----------------------------------------------------------------------------------------


def _clip(x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
    from megabatch import ClipLoss

    value = ClipLoss()(x, y, scale, ids=duplicates(x))
    assert isinstance(value, Tensor)
    return value


def _clip_ignored(x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
    from megabatch import ClipLoss

    value = ClipLoss(duplicates="ignored")(x, y, scale, ids=duplicates(x))
    assert isinstance(value, Tensor)
    return value


def _infonce(x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
    from megabatch import InfoNCELoss

    made: Tensor = InfoNCELoss(1.0)(x, y, ids=duplicates(x), temperature=1 / scale)
    return made


def _infonce_margin(x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
    from megabatch import InfoNCELoss

    made: Tensor = InfoNCELoss(1.0, margin=MARGIN)(x, y, temperature=1 / scale)
    return made


def _nt_xent(x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
    from megabatch import NTXentLoss

    made: Tensor = NTXentLoss(1.0)(x, y, temperature=1 / scale)
    return made


def _supcon(x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
    from megabatch import SupConLoss

    made: Tensor = SupConLoss(1.0)(torch.cat([x, y]), classes(x), temperature=1 / scale)
    return made


def _distillation(x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
    from megabatch import DistillClipLoss

    own, distilled = DistillClipLoss()(x, y, scale, *teacher(x), FACTOR)
    made: Tensor = own + distilled
    return made


def _general(ids: Callable[[Tensor], Tensor]) -> LossFunction:
    """Self-similarity without using the symmetry: all tiles, rows' side only."""

    def loss(x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
        from megabatch.losses.terms import cross_entropy
        from megabatch.similarity import split_logsumexp

        own = ids(x)
        sides = own, own.clone()  # two tensors, so that the symmetry is not detected
        rows, _ = split_logsumexp(torch.cat([x, y]), None, scale, ids=sides, sides="rows")
        return cross_entropy(rows).mean()

    return loss


# --- from the whole matrix ------------------------------------------------------------------------


def _dense(x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
    """The logits of a dense implementation, in float32 for the softmax."""
    s = scale * (x @ y.T)
    return s.to(torch.promote_types(s.dtype, torch.float32))


def dense_clip(x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
    """Equal ids are positives of each other."""
    s, same = _dense(x, y, scale), exact.equal(duplicates(x), duplicates(x))
    target = same.to(s.dtype) / same.sum(1, keepdim=True)
    losses = [-(target * t.log_softmax(1)).sum(1).mean() for t in (s, s.T)]
    return (losses[0] + losses[1]) / 2


def dense_clip_ignored(x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
    """Other pairs of equal ids are ignored, in both directions."""
    same = exact.equal(duplicates(x), duplicates(x))
    s = _dense(x, y, scale).masked_fill(same.fill_diagonal_(False), -torch.inf)
    losses = [-t.log_softmax(1).diagonal().mean() for t in (s, s.T)]
    return (losses[0] + losses[1]) / 2


def dense_infonce(x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
    """Other pairs of equal ids are ignored."""
    s, same = _dense(x, y, scale), exact.equal(duplicates(x), duplicates(x))
    same.fill_diagonal_(False)
    return -s.masked_fill(same, -torch.inf).log_softmax(1).diagonal().mean()


def dense_infonce_margin(x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
    """Negatives that exceed the positive by more than the margin are ignored."""
    s = _dense(x, y, scale)
    limit = s.detach().diagonal() + MARGIN * scale.detach()
    return -s.masked_fill(s > limit[:, None], -torch.inf).log_softmax(1).diagonal().mean()


def _dense_supervised(ids: Callable[[Tensor], Tensor]) -> LossFunction:
    def loss(x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
        z, own = torch.cat([x, y]), ids(x)
        eye = torch.eye(len(z), dtype=torch.bool, device=z.device)
        logp = _dense(z, z, scale).masked_fill(eye, -torch.inf).log_softmax(1)
        positive = exact.equal(own, own) & ~eye
        return -(logp.masked_fill(~positive, 0).sum(1) / positive.sum(1)).mean()

    return loss


def dense_distillation(x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
    """As OpenCLIP's DistillClipLoss: CLIP's loss, and cross-entropies to the teacher's softmax."""
    s, t = _dense(x, y, scale), _dense(*teacher(x), torch.tensor(FACTOR))
    losses = [
        -a.log_softmax(1).diagonal().mean() - (b.softmax(1) * a.log_softmax(1)).sum(1).mean()
        for a, b in ((s, t), (s.T, t.T))
    ]
    return (losses[0] + losses[1]) / 2


# --- exact ----------------------------------------------------------------------------------------


def _of_views(ids: Callable[[Tensor], Tensor]) -> Callable[..., Truth]:
    def of_views(x: Tensor, y: Tensor, scale: float) -> Truth:
        z = torch.cat([x, y])
        found = exact.supervised(z, ids(x), scale)
        return found._replace(dx=found.dx[: len(x)], dy=found.dx[len(x) :])

    return of_views


def _exact_clip(x: Tensor, y: Tensor, scale: float) -> Truth:
    return exact.clip_with_ids(x, y, scale, duplicates(x))


def _exact_clip_ignored(x: Tensor, y: Tensor, scale: float) -> Truth:
    return exact.clip_without_duplicates(x, y, scale, duplicates(x))


def _exact_distillation(x: Tensor, y: Tensor, scale: float) -> Truth:
    return exact.distillation(x, y, scale, *teacher(x), FACTOR)


def _exact_infonce(x: Tensor, y: Tensor, scale: float) -> Truth:
    return exact.infonce(x, y, scale, ids=duplicates(x))


def _exact_infonce_margin(x: Tensor, y: Tensor, scale: float) -> Truth:
    return exact.infonce(x, y, scale, margin=MARGIN)


def _loss(
    name: str,
    ours: LossFunction,
    dense: LossFunction,
    truth: Callable[..., Truth],
    work: int,
    general: LossFunction | None = None,
) -> Loss:
    made = [
        Contender("megabatch", lambda: ours),
        Contender("dense", lambda: dense),
    ]
    if general is not None:
        made.append(Contender("general", lambda: general))
    return Loss(name, {contender.name: contender for contender in made}, truth, work)


# The matrix of two views has 4 b² logits, of which half suffice: 8 * 4 / 2.
FAMILY = {
    loss.name: loss
    for loss in (
        _loss("clip-ids", _clip, dense_clip, _exact_clip, 8),
        _loss("clip-ids-ignored", _clip_ignored, dense_clip_ignored, _exact_clip_ignored, 8),
        _loss(
            "nt-xent",
            _nt_xent,
            _dense_supervised(instances),
            _of_views(instances),
            16,
            _general(instances),
        ),
        _loss(
            "supcon", _supcon, _dense_supervised(classes), _of_views(classes), 16, _general(classes)
        ),
        _loss("infonce-ids", _infonce, dense_infonce, _exact_infonce, 8),
        _loss("infonce-margin", _infonce_margin, dense_infonce_margin, _exact_infonce_margin, 8),
        _loss("distillation", _distillation, dense_distillation, _exact_distillation, 12),
    )
}


# --- the sigmoid loss and plain log-sum-exps ------------------------------------------------------


def dense_siglip(x: Tensor, y: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    """SigLIP's loss from one matrix of logits."""
    z = scale * (x @ y.T) + bias
    wide = torch.promote_types(z.dtype, torch.float32)
    return (F.softplus(z.to(wide)).sum() - z.diagonal().to(wide).sum()) / len(x)


def _megabatch_siglip() -> LossFunction:
    from megabatch import SigLipLoss

    return SigLipLoss()


def _megabatch_logsumexp() -> LossFunction:
    from megabatch.similarity import logsumexp

    return _means(logsumexp)


def _dense_logsumexp() -> LossFunction:
    def logsumexp(x: Tensor, y: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        logits = scale * (x @ y.T)
        return logits.logsumexp(1), logits.logsumexp(0)

    return _means(logsumexp)


def _means(logsumexp: Callable[..., tuple[Tensor, Tensor | None]]) -> LossFunction:
    def loss(x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
        rows, columns = logsumexp(x, y, scale)
        assert columns is not None
        return rows.mean() + columns.mean()

    return loss


def _siglip_kernel() -> LossFunction:
    """siglip-kernel's default implementation."""
    from siglip_kernel import fused_siglip_loss

    def loss(x: Tensor, y: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
        value: Tensor = fused_siglip_loss(x, y, scale.log(), bias)
        return value

    return loss


SIGLIP = Loss(
    "siglip",
    by_name(
        Contender("megabatch", _megabatch_siglip),
        Contender("dense", lambda: dense_siglip),
        Contender("dense-compiled", compiled(lambda: dense_siglip), cuda=True),
        Contender("siglip-kernel", _siglip_kernel, ("siglip_kernel", "siglip-kernel"), cuda=True),
    ),
    exact.siglip,
    work=6,  # no second matrix: a pair's gradient needs no sum over others
    bias=-10.0,
)

LOGSUMEXP = Loss(
    "logsumexp",
    by_name(
        Contender("megabatch", _megabatch_logsumexp),
        Contender("dense", _dense_logsumexp),
    ),
    exact.logsumexp,
    work=8,
)

#: All losses, by which cases name them.
LOSSES = {loss.name: loss for loss in (CLIP, SIGLIP, LOGSUMEXP, *FAMILY.values())}
