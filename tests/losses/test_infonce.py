"""InfoNCELoss against its formula, with each option and any combination of them."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import megabatch as mb
from megabatch.losses import negatives as module
from megabatch.losses.infonce import HardnessMode
from tests.losses.reference import assert_equal, infonce, leaves
from tests.similarity.features import MAKERS

B, D = 12, 5
IDS = torch.tensor([0, 1, 1, 2, -1, -1, 0, 0, 3, 4, 5, 5])
TOWERS = ("query", "positive")
MODES = get_args(HardnessMode)

makers = pytest.mark.parametrize("maker", MAKERS)


def features(maker: str) -> tuple[Tensor, Tensor, dict[str, Tensor], Tensor]:
    """query, positive, negatives of both kinds, queue."""
    query, positive = MAKERS[maker](B, B, D)
    if maker == "duplicated":  # many ties, which rounding must not decide
        query, positive = query + 0.01 * torch.randn_like(query), positive.roll(1, 0)
    (_, shared), (_, hard), (_, queue) = (MAKERS[maker](B, n, D) for n in (7, B * 3, 9))
    return query, positive, {"shared": shared, "hard": hard.view(B, 3, D)}, queue


def equals_its_formula(
    query: Tensor,
    positive: Tensor,
    negatives: dict[str, Tensor],
    *scales: float,
    guide: dict[str, Tensor] | None = None,
    options: dict[str, Any],
    **given: Any,
) -> None:
    """`negatives`: of at most one kind; `given`: queue, ids, weights."""
    kinds = list(negatives)
    guides = {
        f"guide_{'negatives' if name in kinds else name}": f for name, f in (guide or {}).items()
    }
    loss = mb.InfoNCELoss(1.0, **options)

    def ours(q: Tensor, p: Tensor, *rest: Tensor) -> Tensor:
        *n, s = rest
        return loss(q, p, *n, temperature=1 / s, **guides, **given)

    def truth(q: Tensor, p: Tensor, *rest: Tensor) -> Tensor:
        *n, s = rest
        return infonce(q, p, s, **dict(zip(kinds, n, strict=True)), guide=guide, **options, **given)

    for scale in scales:
        assert_equal(ours, truth, query, positive, *negatives.values(), scale)


@makers
def test_plain_pairs_both_directions_and_weighted_negatives(maker: str) -> None:
    query, positive, negatives, _ = features(maker)
    shared = {"shared": negatives["shared"]}
    scales = (0.01, 20.0, 100.0)
    equals_its_formula(query, positive, {}, *scales, options={})
    weighted = {"hardness_mode": "all_negatives", "hardness_strength": 9.0}
    for options in ({"reverse": "joint"}, {"reverse": "separate"}, weighted):
        equals_its_formula(query, positive, shared, *scales, options=options)


@pytest.mark.parametrize("options", [{"label_smoothing": 0.2}, {"tau_plus": 0.1}])
@makers
def test_smoothed_and_debiased(maker: str, options: Any) -> None:
    query, positive, negatives, queue = features(maker)
    query, positive, queue = (F.normalize(t, dim=-1) for t in (query, positive, queue))
    given = {"queue": queue, "weights": torch.rand(B, dtype=torch.float64)}
    for kind, share in (("", False), ("shared", False), ("hard", False), ("hard", True)):
        used = {kind: F.normalize(negatives[kind], dim=-1)} if kind else {}
        both = options | {"share_negatives": share}
        equals_its_formula(query, positive, used, 10.0, options=both, **given)


@settings(deadline=None, max_examples=150)
@given(
    b=st.integers(1, 14),
    k=st.integers(0, 9),
    d=st.integers(1, 6),
    kind=st.sampled_from([None, "shared", "hard"]),
    margin=st.sampled_from([None, 0.1, 0.0, -0.3]),
    ids=st.one_of(st.none(), st.integers(0, 1 << 30)),
    towers=st.sets(st.sampled_from(TOWERS)),
    mode=st.sampled_from([None, *MODES]),
    reverse=st.sampled_from([None, "joint", "separate"]),
    share=st.booleans(),
    queue=st.booleans(),
    weighted=st.booleans(),
    strategy=st.sampled_from(["absolute", "relative"]),
    guided=st.booleans(),
    maker=st.sampled_from(["random", "learnt", "clustered", "badly_scaled"]),
)
def test_any_combination(
    b: int, k: int, d: int, kind: Any, margin: Any, ids: Any, towers: Any, mode: Any, reverse: Any,
    share: bool, queue: bool, weighted: bool, strategy: str, guided: bool, maker: str,
) -> None:  # fmt: skip
    torch.manual_seed(b * 100 + k)
    query, positive = MAKERS[maker](b, b, d)
    # Lengths in even logarithmic steps give products that tie, which rounding must not decide.
    if maker == "badly_scaled":
        query = query * (1 + 0.1 * torch.rand(b, 1, dtype=torch.float64))
    negatives = torch.randn((k, d) if kind == "shared" else (b, k, d), dtype=torch.float64)
    memory = torch.randn(4, d, dtype=torch.float64) if queue else None
    if ids is not None:
        ids = torch.randint(-1, 5, (b,), generator=torch.Generator().manual_seed(ids))
    if kind == "shared":  # shared negatives belong to no query
        mode, share = "all_negatives" if mode == "hard_negatives" else mode, False
    guide: dict[str, Tensor] | None = None
    if guided and margin is not None:
        given = {"query": query, "positive": positive, kind: negatives, "queue": memory}
        guide = {
            name: torch.randn(*like.shape[:-1], 3, dtype=torch.float64)
            for name, like in given.items()
            if name is not None and like is not None
        }
    options = {
        "margin": margin,
        "margin_strategy": strategy,
        "same_tower": () if reverse == "separate" else tuple(towers),
        "reverse": reverse,
        "share_negatives": share,
        "hardness_mode": mode,
        "hardness_strength": 3.0 if mode else 0.0,
    }
    used = {kind: negatives} if kind else {}
    inputs = {"queue": memory, "ids": ids}
    if weighted:
        inputs["weights"] = torch.rand(b, dtype=torch.float64)
    equals_its_formula(query, positive, used, 10.0, guide=guide, options=options, **inputs)


def test_learnable_temperature() -> None:
    query, positive, *_ = features("learnt")
    temperature = torch.nn.Parameter(torch.tensor([0.2], dtype=torch.float64))
    loss = mb.InfoNCELoss(temperature)
    assert [name for name, _ in loss.named_parameters()] == ["temperature"]
    loss(query, positive).backward()
    other = leaves(0.2)[0]
    infonce(query, positive, 1 / other).backward()
    torch.testing.assert_close(temperature.grad, other.grad.reshape(1), rtol=1e-11, atol=0)


def test_a_query_without_negatives_has_loss_zero_and_a_queue_no_gradient() -> None:
    query, positive, queue = leaves(*(torch.randn(3, 4) for _ in range(3)))
    nothing, ids = torch.zeros(3, 0, 4).double(), torch.zeros(3).long()
    for loss in (mb.InfoNCELoss(0.1), mb.InfoNCELoss(0.1, same_tower=("query",))):
        value = loss(query, positive, nothing, ids=ids)
        value.backward()
        assert value == 0
        assert not query.grad.any()
    value = mb.InfoNCELoss(0.1, reverse="joint")(query, positive, ids=ids)
    torch.testing.assert_close(value, torch.tensor(2.0).double().log())
    mb.InfoNCELoss(0.1)(query, positive, queue=queue).backward()
    assert queue.grad is None


def test_a_guide_is_normalised_as_the_features_are() -> None:
    query, positive, negatives, _ = features("random")
    guide, lengths = negatives["shared"], torch.arange(1, 7)[:, None]
    guides = {"guide_query": 3 * guide[:6], "guide_positive": 5 * guide[1:7]}
    normalised = {name: F.normalize(g, dim=1) for name, g in guides.items()}
    ours = mb.InfoNCELoss(0.1, margin=0.0, normalize=True)
    value = ours(lengths * query[:6], positive[:6], **guides)
    truth = mb.InfoNCELoss(0.1, margin=0.0)(query[:6], positive[:6], **normalised)
    torch.testing.assert_close(value, truth)


@pytest.mark.parametrize("guided", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_copies_of_the_positive_are_not_excluded(dtype: torch.dtype, guided: bool) -> None:
    """At a margin of 0 they lie on the limit, and rounding puts them on either side of it."""
    b, d = 200, 384
    query = F.normalize(torch.randn(b, d), dim=1).to(dtype)
    positive = query[:1].expand(b, d)
    features, guides = (query, positive), {}
    if guided:
        features = query[:, :8], query[:, 8:16]
        guides = {"guide_query": query, "guide_positive": positive}
    value = mb.InfoNCELoss(1.0, margin=0.0)(*features, **guides)
    torch.testing.assert_close(value, mb.InfoNCELoss(1.0)(*features), rtol=1e-6, atol=0)
    assert mb.InfoNCELoss(1.0, margin=-1e-5)(*features, **guides) == 0  # excludes all


def test_hard_negatives_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    query, positive, negatives, _ = features("random")
    monkeypatch.setattr(module, "CHUNK", 5 * negatives["hard"][0].numel())
    equals_its_formula(query, positive, {"hard": negatives["hard"]}, 10.0, options={})


def test_hard_negatives_save_no_float32_copies() -> None:
    shapes = (32, 8), (32, 8), (32, 6, 8)
    inputs = [torch.randn(*shape, dtype=torch.bfloat16, requires_grad=True) for shape in shapes]
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        loss = mb.InfoNCELoss(0.1)(*inputs)
    assert not any(t.dtype == torch.float32 and t.numel() >= inputs[2].numel() for t in saved)
    loss.backward()
    assert inputs[2].grad is not None
    assert inputs[2].grad.any()


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.3}])
def test_logits_outside_of_sweeps_are_float32(options: Any) -> None:
    query, positive, negatives, _ = features("learnt")
    query, positive = query.bfloat16(), positive.bfloat16()
    for kind, some in negatives.items():
        exact = infonce(
            *(query.double(), positive.double(), 20.0),
            **{kind: some.bfloat16().double()},
            **options,
        )
        loss = mb.InfoNCELoss(0.05, **options)
        ours = loss(query, positive, some.bfloat16())
        torch.testing.assert_close(ours.double(), exact, rtol=1e-5, atol=1e-6)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            cast = loss(query.float(), positive.float(), some.float())
        torch.testing.assert_close(cast, ours, rtol=0, atol=0)


def test_several_sweeps_in_bfloat16() -> None:
    """Each rounds the queries' gradient once."""
    query, positive = (t.bfloat16() for t in MAKERS["learnt"](96, 96, 32))
    hard = MAKERS["random"](96, 96 * 4, 32)[1].view(96, 4, 32).bfloat16()
    loss = mb.InfoNCELoss(0.05, same_tower=TOWERS)
    results = []
    for dtype in (torch.bfloat16, torch.float64):
        inputs = [t.to(dtype).detach().clone().requires_grad_() for t in (query, positive, hard)]
        loss(*inputs).backward()
        results.append([t.grad.double().flatten(0, -2) for t in inputs])
    for mine, exact in zip(*results, strict=True):
        error = (mine - exact).norm(dim=1) / exact.norm(dim=1).clamp(min=1e-6)
        assert error.median() < 0.005
        assert error.max() < 0.02
