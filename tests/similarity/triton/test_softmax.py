"""The kernels of log-sum-exp against dense float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megabatch import similarity
from tests.similarity import dense
from tests.similarity.features import MAKERS
from tests.similarity.test_precision import assert_row_errors
from tests.similarity.test_statistics import some_ids, weighted_sum
from tests.similarity.triton import DEVICE, GPU, HALVES, MARKS, SECOND

pytest.importorskip("triton")
from megabatch.similarity.triton import configs
from megabatch.similarity.triton.configs import Config

pytestmark = MARKS


def make(maker: str, m: int, n: int, d: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    x, y = MAKERS[maker](m, n, d)
    return x.to(DEVICE, dtype), y.to(DEVICE, dtype)


def leaves(*values: Tensor | float, dtype: torch.dtype | None = None) -> list[Tensor]:
    return [
        torch.as_tensor(v, dtype=dtype, device=DEVICE).clone().detach().requires_grad_()
        for v in values
    ]


def both(*features: Tensor, scale: float) -> tuple[list[Tensor], list[Tensor]]:
    """Leaves for the kernels, with the scale in float32, and for the dense expression."""
    mine = leaves(*features) + leaves(scale, dtype=torch.float32)
    return mine, leaves(*features, scale, dtype=torch.float64)


def flat(sides) -> list[Tensor]:  # type: ignore[no-untyped-def]
    return [part.cpu().double() for side in sides for part in side]


def check(ours, truth, mine: list[Tensor], theirs: list[Tensor]) -> None:  # type: ignore[no-untyped-def]
    """Compare values to the rounding of float32 logits, gradients to that of half precision."""
    for a, b in zip(flat(ours), flat(truth), strict=True):
        assert torch.equal(a == -torch.inf, b == -torch.inf)
        finite = b.isfinite()
        size = max(1.0, float(b[finite].detach().abs().max())) if finite.any() else 1.0
        torch.testing.assert_close(a[finite], b[finite], rtol=0, atol=2e-6 * size)
    weighted_sum(flat(ours)).backward()
    weighted_sum(flat(truth)).backward()
    for a, b in zip(mine, theirs, strict=True):
        size = b.grad.norm()
        if b.dim() == 0:  # a sum over all of x, whose terms may cancel
            size = theirs[0].grad.norm() * theirs[0].detach().norm() / b.detach().abs()
        # dS and the gradient are each rounded once; with random upstreams no errors cancel.
        assert (a.grad.double() - b.grad).norm() <= torch.finfo(mine[0].dtype).eps * size + 1e-7


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("m", [150, pytest.param(2501, marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    ("maker", "scale"),
    [(maker, 200.0) for maker in MAKERS]
    + [(maker, 14.3) for maker in SECOND]
    + [("random", 0.01), ("clustered", 0.01), ("learnt", 100.0), ("outliers", 100.0)],
)
def test_clip_meets_the_per_row_criterion(
    maker: str, scale: float, m: int, dtype: torch.dtype
) -> None:
    x, y = make(maker, m, m, 40 if m == 150 else 200, dtype)
    assert_row_errors(x, y, scale, exponents=4)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("ceiling", [False, True])
@pytest.mark.parametrize("ids", ["paired", "some", "paired among some"])
@pytest.mark.parametrize("maker", ["random", "duplicated", "outliers"])
def test_split_logsumexp(maker: str, ids: str, ceiling: bool, dtype: torch.dtype) -> None:
    m, n, d = (150, 200, 24) if ids == "some" else (150, 150, 24)
    x, y = make(maker, m, n, d, dtype)
    chosen = ids if ids == "paired" else tuple(t.to(DEVICE) for t in some_ids(m, n, 20))
    options = {"ids": chosen, "positives": "ids" if ids == "some" else "paired"}
    limit = torch.full((m,), 0.1234 * 20, device=DEVICE) if ceiling else None
    mine, theirs = both(x, y, scale=20.0)
    ours = similarity.split_logsumexp(*mine, ceiling=limit, **options)
    wide = None if limit is None else limit.double()
    check(ours, dense.split_logsumexp(*theirs, ceiling=wide, **options), mine, theirs)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    "case", ["paired", "some", "paired among some", "rows", "float32", "itself"]
)
def test_a_guide(case: str, dtype: torch.dtype) -> None:
    """The guide has another width; the pairs that it leaves out have the largest logits."""
    m, n, d = (150, 200, 24) if case == "some" else (150, 150, 24)
    x, y = make("clustered", m, n, d, dtype)
    y = x if case == "itself" else y
    ids = tuple(t.to(DEVICE) for t in some_ids(m, n, 20))
    chosen = "paired" if case in ("paired", "rows", "float32") else ids
    options = {"ids": chosen, "positives": "paired" if "paired" in case else "ids"}
    guide_x, guide_y = (F.pad(t[:, :20].float(), (0, 11)) + 0.01 for t in (x, y))
    if case != "float32":
        guide_x, guide_y = guide_x.to(dtype), guide_y.to(dtype)
    # The limit lies in the largest gap of each row, so that rounding does not decide; one row
    # keeps every pair, one none.
    ordered = (guide_x.double() @ guide_y.double().T).sort(1).values
    gap = ordered.diff()[:, 20:-20].argmax(1, keepdim=True) + 20
    limit = ((ordered.gather(1, gap) + ordered.gather(1, gap + 1)) / 2)[:, 0].float()
    limit[:2] = torch.tensor([9.0, -9.0])
    # Logits spread widely: a reference taken from pairs left out would underflow the others.
    scale = -60.0 if case == "float32" else 60.0
    mine, theirs = both(x, y, scale=scale)
    if case == "itself":
        mine[1], theirs[1] = None, None
    guide = guide_x, guide_y
    sides = "rows" if case == "rows" else "both"
    ours = similarity.split_logsumexp(*mine, ceiling=limit, guide=guide, sides=sides, **options)
    wide = guide_x.double(), guide_y.double()
    truth = dense.split_logsumexp(*theirs, ceiling=limit.double(), guide=wide, **options)
    if case == "rows":
        ours, truth = ours[:1], truth[:1]
    check(ours, truth, [t for t in mine if t is not None], [t for t in theirs if t is not None])


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("width", [24, 29])
def test_a_bias_of_columns(width: int, dtype: torch.dtype) -> None:
    x, y = make("clustered", 150, 200, width, dtype)
    ids = tuple(t.to(DEVICE) for t in some_ids(150, 200, 20))
    mine, theirs = both(x, y, scale=20.0)
    bias = -15 * torch.rand(200, device=DEVICE)
    mine += leaves(bias)
    theirs += leaves(bias, dtype=torch.float64)
    ours = similarity.split_logsumexp(*mine[:3], ids=ids, col_bias=mine[3])
    truth = dense.split_logsumexp(*theirs[:3], ids=ids, col_bias=theirs[3])
    check(ours, truth, mine, theirs)


@pytest.mark.parametrize(
    ("maker", "rows", "workspace"),
    [  # blocks of 512, or one block
        ("clustered", 2, 512 << 10),
        ("random", 1, 512 << 20),
        ("spread", 4, 512 << 20),
        ("random", None, 512 << 20),
    ],
)
def test_self_similarity(
    maker: str, rows: int | None, workspace: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lower triangle mirrors the upper: sums of rows serve columns, dS is stored twice."""
    if rows is not None:
        one = Config(rows=rows, group=2, stages=2)
        monkeypatch.setattr(configs, "overrides", {"forward": one, "backward": one})
    similarity.set_workspace(workspace)
    m = 2300 if GPU else 530 if workspace < 512 << 20 else 400
    x, _ = make("random" if maker == "spread" else maker, m, 1, 8, torch.float16)
    if maker == "spread":  # some rows have logits 30 times as large, others only 0
        x[::7] *= 30
        x[200:320] *= 0
    ids = torch.arange(m, device=DEVICE) // 40
    for own in ("paired", ids):
        mine, theirs = both(x, scale=14.3)
        eye = torch.arange(m, device=DEVICE) if isinstance(own, str) else own
        ours = similarity.split_logsumexp(mine[0], None, mine[1], ids=own)
        truth = dense.split_logsumexp(theirs[0], None, theirs[1], ids=(eye, eye))
        check(ours, truth, mine, theirs)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    ("m", "n", "d"),
    [(1, 1, 8), (1, 300, 8), (129, 5, 13), (260, 131, 70), (640, 128, 64), (530, 650, 8)],
)
def test_any_sizes(m: int, n: int, d: int, dtype: torch.dtype) -> None:
    x, y = make("random", m, n, d, dtype)
    mine, theirs = both(x, y, scale=30.0)
    ours = similarity.logsumexp(*mine)
    check([ours], [dense.logsumexp(*theirs)], mine, theirs)


@pytest.mark.parametrize("side", [0, 1])
def test_one_side_only(side: int) -> None:
    x, y = make("random", 200, 150, 24, torch.float16)
    mine, theirs = both(x, y, scale=30.0)
    ours = similarity.logsumexp(*mine, sides=("rows", "both")[side])[side]
    check([[ours]], [[dense.logsumexp(*theirs)[side]]], mine, theirs)


def test_small_upstream_gradients_survive_float16() -> None:
    """With millions of rows, 1 / (2 b) times a small probability is below float16's range."""
    x, y = make("random", 150, 150, 24, torch.float16)
    mine, theirs = leaves(x, y), leaves(x, y, dtype=torch.float64)
    for inputs, module in ((mine, similarity), (theirs, dense)):
        rows, columns = module.logsumexp(*inputs, 1.0)
        ((rows.sum() + columns.sum()) * 1e-3).backward()
    for a, b in zip(mine, theirs, strict=True):
        assert (a.grad.double() - b.grad).norm() <= 2e-3 * b.grad.norm()


def test_the_same_inputs_give_the_same_bits() -> None:
    x, y = make("clustered", 700 if GPU else 200, 700 if GPU else 200, 48, torch.float16)
    results = []
    for _ in range(2):
        mine = leaves(x, y) + leaves(50.0, dtype=torch.float32)
        rows, columns = similarity.split_logsumexp(*mine)
        assert columns is not None
        (rows.negative.sum() + columns.negative.sum()).backward()
        results.append([rows.negative, columns.negative, *(leaf.grad for leaf in mine)])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)
