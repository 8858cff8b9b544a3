"""Values and gradients against the dense float64 expression."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megabatch import similarity
from megabatch.similarity import eager, softmax
from megabatch.similarity import settings as call_settings
from tests.similarity import dense
from tests.similarity.exact import compare, leaves, weighted_sum
from tests.similarity.features import MAKERS

SCALES = (0.01, 14.3, 200.0)
#: Kinds of ids; of x against itself with one vector of ids, and with two.
KINDS = ("paired", "some", "all", "none", "paired among some", "self", "self, one", "self, two")


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("maker", MAKERS)
def test_logsumexp_is_exact(maker: str, scale: float) -> None:
    for m, n, d in ((97, 97, 20), (150, 41, 7), (1, 70, 3), (33, 1, 1)):
        x, y = MAKERS[maker](m, n, d)
        mine, theirs = leaves(x, y, scale), leaves(x, y, scale)
        compare(similarity.logsumexp(*mine), dense.logsumexp(*theirs), mine, theirs)


def some_ids(m: int, n: int, classes: int) -> tuple[Tensor, Tensor]:
    """Ids that recur; some are negative, which equal no other, and some occur on one side alone."""
    generator = torch.Generator().manual_seed(2)
    rows = torch.randint(-2, classes, (m,), generator=generator)
    return rows, torch.randint(-2, classes + 3, (n,), generator=generator)


def compare_split(arguments: list[Any], options: dict[str, Any], for_dense: Any = None) -> None:
    """Compare `split_logsumexp` of (x, y or None, scale). `for_dense`: ids of the dense one."""
    mine, theirs = (leaves(*(a for a in arguments if a is not None)) for _ in range(2))
    results = []
    for function, own, ids in (
        (similarity.split_logsumexp, mine, options["ids"]),
        (dense.split_logsumexp, theirs, for_dense or options["ids"]),
    ):
        y = own[1] if len(own) == 3 else None
        sides = function(own[0], y, own[-1], **options | {"ids": ids})
        results.append([part for side in sides for part in side])
    compare(*results, mine, theirs)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("maker", MAKERS)
def test_split_logsumexp_is_exact(maker: str, kind: str) -> None:
    """Each kind of ids, and each kind of features, with every kind of ceiling."""
    ceiling = ("none", "logits", "guide")[(list(MAKERS).index(maker) + 2 * KINDS.index(kind)) % 3]
    m, n = 90, 61 if kind in ("some", "all", "none") else 90
    x, y = MAKERS[maker](m, n, 12)
    scale = SCALES[(list(MAKERS).index(maker) + KINDS.index(kind)) % 3]
    ids: Any = some_ids(m, n, 20)
    for_dense: Any = None
    if kind in ("paired", "self"):
        ids, for_dense = "paired", "paired" if kind == "paired" else (torch.arange(m),) * 2
    elif kind == "all":  # every pair positive
        ids = torch.zeros(m, dtype=torch.int64), torch.zeros(n, dtype=torch.int64)
    elif kind == "none":
        ids = torch.full((m,), -1), torch.full((n,), -1)
    elif kind == "self, one":
        ids, for_dense = ids[0], (ids[0], ids[0])
    options = {"ids": ids, "positives": "paired" if kind == "paired among some" else "ids"}
    y = None if kind.startswith("self") else y
    if ceiling == "guide":  # from every negative left out to none
        u, v = MAKERS["random"](m, n, 5)
        options["guide"] = (u, u) if y is None else (u, v)
        options["ceiling"] = torch.linspace(-1, 1, m, dtype=torch.float64)
    elif ceiling == "logits":  # between each row's two middle logits, so that rounding is harmless
        ordered = (scale * x @ (x if y is None else y).T).sort(1).values
        options["ceiling"] = (ordered[:, n // 2] + ordered[:, n // 2 + 1]) / 2
        if maker == "duplicated":  # few distinct logits: halfway between two distinct ones
            options["ceiling"] = scale * torch.full((m,), 0.9, dtype=torch.float64)
    compare_split([x, y, scale], options, for_dense)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_guide_has_a_dtype_of_its_own(dtype: torch.dtype) -> None:
    """A guide's products are in float32, and autocast does not cast it."""
    x, y = (t.bfloat16() for t in MAKERS["random"](40, 40, 8))
    guide = [t.to(dtype) for t in MAKERS["random"](40, 40, 16)]
    limit = torch.full((40,), 0.1)
    with torch.autocast("cpu", torch.bfloat16):
        ours = similarity.split_logsumexp(x, y, 20.0, ceiling=limit, guide=guide)
    wide = [t.double() for t in guide]
    truth = dense.split_logsumexp(
        x.double(), y.double(), 20.0, ceiling=limit.double(), guide=(wide[0], wide[1])
    )
    for mine, theirs in zip(ours, truth, strict=True):
        torch.testing.assert_close(mine.negative.double(), theirs.negative, rtol=1e-5, atol=1e-5)


def test_small_gradients_in_float16_without_kernels(half_products: None) -> None:
    x, y = (t.half() for t in MAKERS["random"](16, 4000, 8))
    ids, ceiling = (torch.full((16,), -1), torch.full((4000,), -1)), torch.full((16,), 0.5)
    gradients = []
    for module, dtype in ((similarity, torch.float32), (dense, torch.float64)):
        features = x if dtype == torch.float32 else x.to(dtype)
        features = features.detach().requires_grad_()
        guide = x.to(dtype), y.to(dtype)
        options = {"ids": ids, "ceiling": ceiling, "guide": guide}
        rows, _ = module.split_logsumexp(features, y.to(features.dtype), 0.5, **options)
        (rows.negative.sum() / 100).backward()
        assert features.grad is not None
        gradients.append(features.grad.double())
    error = (gradients[0] - gradients[1]).norm(dim=1) / gradients[1].norm(dim=1)
    assert error.max() < 1e-3


@pytest.mark.parametrize("symmetric", [False, True])
def test_saved_logits_are_not_recomputed_in_the_backward_pass(
    monkeypatch: pytest.MonkeyPatch, symmetric: bool
) -> None:
    """The gradients are the same however many blocks are saved, also of a second backward pass."""
    products = []
    original = eager.logits
    monkeypatch.setattr(eager, "block_shape", lambda like, *_: (10, 10))
    monkeypatch.setattr(eager, "logits", lambda *a, **k: products.append(1) or original(*a, **k))
    x, y = MAKERS["clustered"](100, 100, 6)
    blocks = 55 if symmetric else 100
    results = []
    for saved in (0, 30, blocks):
        monkeypatch.setattr(softmax, "saved_logits", lambda x, y, limit, saved=saved: 100 * saved)
        mine = leaves(x, 30.0) if symmetric else leaves(x, y, 30.0)
        ours = similarity.split_logsumexp(*((mine[0], None, mine[1]) if symmetric else mine))
        products.clear()
        total = weighted_sum([part for side in ours for part in side])
        total.backward(retain_graph=True)
        assert len(products) == blocks - saved
        total.backward()
        results.append([leaf.grad for leaf in mine])
    for result in results[1:]:
        for a, b in zip(result, results[0], strict=True):
            assert torch.equal(a, b)


def test_no_logits_are_saved_without_gradients_or_room() -> None:
    x, y = torch.randn(40, 4), torch.randn(30, 4)
    assert softmax.saved_logits(x, y, 256 << 20) == 1200
    arguments = (x, y, torch.tensor(1.0), *[None] * 8, "plain", 0, True)
    plain = (False, "logsumexp", "", call_settings.of_call(x))
    assert torch.ops.megabatch.logsumexps(*arguments, *plain)[3].numel() == 0
    assert softmax.saved_logits(torch.randn(3000, 4), torch.randn(3000, 4), 64 << 10) <= 16 << 10
