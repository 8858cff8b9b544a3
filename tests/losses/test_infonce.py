from __future__ import annotations

from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import megabatch as mb
from megabatch.losses.infonce import HardnessMode
from tests.losses.reference import assert_equal, infonce, leaves
from tests.similarity.features import MAKERS

B, D = 12, 5
IDS = torch.tensor([0, 1, 1, 2, -1, -1, 0, 0, 3, 4, 5, 5])

IN_BATCH = {"hardness_mode": "in_batch_negatives", "hardness_strength": 9.0}


def features(maker: str) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """query, positive, shared negatives, own negatives, queue."""
    query, positive = MAKERS[maker](B, B, D)
    _, shared = MAKERS[maker](B, 7, D)
    _, own = MAKERS[maker](B, B * 3, D)
    _, queue = MAKERS[maker](B, 9, D)
    return query, positive, shared, own.view(B, 3, D), queue


@pytest.mark.parametrize("scale", [0.01, 20.0, 100.0])
@pytest.mark.parametrize("maker", MAKERS)
def test_plain(maker: str, scale: float) -> None:
    query, positive, *_ = features(maker)
    assert_equal(lambda q, p, s: mb.InfoNCELoss(1 / s)(q, p), infonce, query, positive, scale)


@pytest.mark.parametrize("kind", ["shared", "own"])
@pytest.mark.parametrize("margin", [None, 0.1, -0.05])
@pytest.mark.parametrize("maker", MAKERS)
def test_further_negatives(maker: str, margin: float | None, kind: str) -> None:
    query, positive, shared, own, queue = features(maker)
    # Duplicated features have many ties, which rounding must not decide.
    if maker == "duplicated":
        query, positive = query + 0.01 * torch.randn_like(query), positive.roll(1, 0)
    weights = torch.rand(B, dtype=torch.float64)
    loss = mb.InfoNCELoss(0.05, margin=margin, same_tower=("query", "positive"))
    assert_equal(
        lambda q, p, n, k: loss(q, p, n, queue=k, ids=IDS, weights=weights),
        lambda q, p, n, k: infonce(
            q,
            p,
            20.0,
            **{kind: n},
            queue=k,
            ids=IDS,
            margin=margin,
            same_tower=("query", "positive"),
            weights=weights,
        ),
        query,
        positive,
        shared if kind == "shared" else own,
        queue,
    )


@settings(deadline=None, max_examples=40)
@given(
    b=st.integers(1, 14),
    k=st.integers(0, 9),
    d=st.integers(1, 6),
    kind=st.sampled_from([None, "shared", "own"]),
    margin=st.sampled_from([None, 0.1, 0.0, -0.3]),
    ids=st.one_of(st.none(), st.integers(0, 1 << 30)),
    towers=st.sets(st.sampled_from(["query", "positive"])),
    mode=st.sampled_from([None, *get_args(HardnessMode)]),
    joint=st.booleans(),
    share=st.booleans(),
    queue=st.booleans(),
    strategy=st.sampled_from(["absolute", "relative"]),
    guided=st.booleans(),
    maker=st.sampled_from(["random", "learnt", "clustered", "badly_scaled"]),
)
def test_any_combination(
    b: int,
    k: int,
    d: int,
    kind: Any,
    margin: Any,
    ids: Any,
    towers: Any,
    mode: Any,
    joint: bool,
    share: bool,
    queue: bool,
    strategy: Any,
    guided: bool,
    maker: str,
) -> None:
    torch.manual_seed(b * 100 + k)
    query, positive = MAKERS[maker](b, b, d)
    # Lengths in even logarithmic steps give products that tie, which rounding must not decide.
    if maker == "badly_scaled":
        query = query * (1 + 0.1 * torch.rand(b, 1, dtype=torch.float64))
    negatives = torch.randn((k, d) if kind == "shared" else (b, k, d), dtype=torch.float64)
    memory = torch.randn(4, d, dtype=torch.float64) if queue else None
    pairs = None
    if ids is not None:
        pairs = torch.randint(-1, 5, (b,), generator=torch.Generator().manual_seed(ids))
    if kind == "shared":  # shared negatives belong to no query
        mode, share = "all_negatives" if mode == "hard_negatives" else mode, False
    guide: dict[str, Tensor] = {}
    if guided and margin is not None:
        given = {"query": query, "positive": positive, kind: negatives, "queue": memory}
        for name, like in given.items():
            if name is not None and like is not None:
                guide[name] = torch.randn(*like.shape[:-1], 3, dtype=torch.float64)
    named = {
        f"guide_{'negatives' if name in ('shared', 'own') else name}": features
        for name, features in guide.items()
    }
    options = {
        "margin": margin,
        "margin_strategy": strategy,
        "same_tower": tuple(towers),
        "reverse": "joint" if joint else None,
        "share_negatives": share,
        "hardness_mode": mode,
        "hardness_strength": 3.0 if mode else 0.0,
    }
    loss = mb.InfoNCELoss(0.1, **options)
    assert_equal(
        lambda q, p, n: loss(q, p, n if kind else None, queue=memory, ids=pairs, **named),
        lambda q, p, n: infonce(
            q,
            p,
            10.0,
            **({kind: n} if kind else {}),
            queue=memory,
            ids=pairs,
            guide=guide or None,
            **options,
        ),
        query,
        positive,
        negatives,
    )


@pytest.mark.parametrize("scale", [0.01, 20.0, 100.0])
@pytest.mark.parametrize("reverse", ["joint", "separate"])
@pytest.mark.parametrize("maker", MAKERS)
def test_both_directions(maker: str, reverse: Any, scale: float) -> None:
    query, positive, shared, *_ = features(maker)
    assert_equal(
        lambda q, p, n, s: mb.InfoNCELoss(1 / s, reverse=reverse)(q, p, n),
        lambda q, p, n, s: infonce(q, p, s, shared=n, reverse=reverse),
        query,
        positive,
        shared,
        scale,
    )


@pytest.mark.parametrize("options", [{"margin": -0.05}, IN_BATCH, {"share_negatives": True}])
@pytest.mark.parametrize("reverse", ["joint", "separate"])
def test_both_directions_with_other_options(reverse: Any, options: Any) -> None:
    query, positive, _, own, queue = features("learnt")
    loss = mb.InfoNCELoss(0.05, reverse=reverse, **options)
    assert_equal(
        lambda q, p, n: loss(q, p, n, queue=queue, ids=IDS),
        lambda q, p, n: infonce(
            q, p, 20.0, own=n, queue=queue, ids=IDS, reverse=reverse, **options
        ),
        query,
        positive,
        own,
    )


def test_gtes_joint_softmax() -> None:
    query, positive, *_ = features("learnt")

    def gte(q: Tensor, p: Tensor, s: Tensor) -> Tensor:
        itself = torch.eye(B, dtype=torch.bool)
        within = [(s * t @ t.T).masked_fill(itself, -torch.inf) for t in (q, p)]
        z = torch.cat([s * q @ p.T, s * p @ q.T, *within], 1).logsumexp(1)
        return (z - s * (q * p).sum(1)).mean()

    loss = mb.InfoNCELoss(1.0, same_tower=("query", "positive"), reverse="joint")
    assert_equal(lambda q, p, s: loss(q, p, temperature=1 / s), gte, query, positive, 20.0)


def test_separate_directions_of_plain_pairs_are_clips_loss() -> None:
    query, positive, *_ = features("learnt")
    ours = mb.InfoNCELoss(0.1, reverse="separate")(query, positive, ids=IDS)
    clip = mb.ClipLoss(duplicates="ignored")(query, positive, 10.0, ids=IDS)
    torch.testing.assert_close(ours, clip, rtol=1e-12, atol=0)


def test_learnable_temperature() -> None:
    query, positive, *_ = features("learnt")
    temperature = torch.nn.Parameter(torch.tensor([0.2], dtype=torch.float64))
    loss = mb.InfoNCELoss(temperature)
    assert [name for name, _ in loss.named_parameters()] == ["temperature"]
    assert_equal(
        lambda t: loss(query, positive, temperature=t),
        lambda t: infonce(query, positive, 1 / t),
        0.2,
    )
    loss(query, positive).backward()
    other = leaves(0.2)[0]
    infonce(query, positive, 1 / other).backward()
    torch.testing.assert_close(temperature.grad, other.grad.reshape(1), rtol=1e-11, atol=0)


def test_a_query_without_negatives_has_loss_zero() -> None:
    query, positive = leaves(torch.randn(3, 4), torch.randn(3, 4))
    for loss in (mb.InfoNCELoss(0.1), mb.InfoNCELoss(0.1, same_tower=("query",))):
        value = loss(query, positive, torch.zeros(3, 0, 4).double(), ids=torch.zeros(3).long())
        value.backward()
        assert value == 0
        assert not query.grad.any()
    value = mb.InfoNCELoss(0.1, reverse="joint")(query, positive, ids=torch.zeros(3).long())
    torch.testing.assert_close(value, torch.tensor(2.0).double().log())


def test_the_queue_gets_no_gradient() -> None:
    query, positive, queue = leaves(*(torch.randn(3, 4) for _ in range(3)))
    mb.InfoNCELoss(0.1)(query, positive, queue=queue).backward()
    assert queue.grad is None


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"hardness_mode": "all_negatives", "hardness_strength": 5.0},
        {"reverse": "joint"},
        {"reverse": "separate"},
        {"label_smoothing": 0.1},
        {"tau_plus": 0.1},
    ],
)
def test_a_nan_gives_a_nan(options: Any) -> None:
    query, positive, shared, own, queue = (t.clone() for t in features("random"))
    for bad in (query, positive, shared, own, queue):
        before = bad.view(-1)[3].item()
        bad.view(-1)[3] = torch.nan
        loss = mb.InfoNCELoss(0.1, **options)
        values = loss(query, positive, shared, queue=queue), loss(query, positive, own, queue=queue)
        assert any(value.isnan() for value in values)
        bad.view(-1)[3] = before


def gistembed(
    query: Tensor,
    positive: Tensor,
    scale: float,
    guide_query: Tensor,
    guide_positive: Tensor,
    margin: float,
    relative: bool,
) -> Tensor:
    """Equation 3 of Solatorio 2024 (arXiv 2402.16829), with sentence-transformers' two margins."""
    similarity = torch.cat([query @ positive.T, query @ query.T, positive @ positive.T], 1)
    guides = guide_query @ guide_positive.T, guide_query @ guide_query.T
    guided = torch.cat([*guides, guide_positive @ guide_positive.T], 1)
    hit = guided.diagonal()[:, None]
    left_out = guided > hit - margin * (hit.abs() if relative else 1)
    left_out.diagonal()[:] = False
    logits = scale * similarity.masked_fill(left_out, -torch.inf)
    return torch.nn.functional.cross_entropy(logits, torch.arange(len(query)))


@pytest.mark.parametrize("relative", [False, True])
def test_gistembed(relative: bool) -> None:
    query, positive, *_ = features("clustered")
    guides = [torch.nn.functional.normalize(t) for t in MAKERS["learnt"](B, B, 4)]
    strategy = "relative" if relative else "absolute"
    loss = mb.InfoNCELoss(
        0.05, margin=-0.1, margin_strategy=strategy, same_tower=("query", "positive")
    )
    assert_equal(
        lambda q, p: loss(q, p, guide_query=guides[0], guide_positive=guides[1]),
        lambda q, p: gistembed(q, p, 20.0, *guides, 0.1, relative),
        query,
        positive,
    )


def test_a_guide_is_normalised_as_the_features_are() -> None:
    query, positive, guide, *_ = features("random")
    guides = {"guide_query": 3 * guide[:6], "guide_positive": 5 * guide[1:7]}
    lengths = torch.arange(1, 7)[:, None]
    ours = mb.InfoNCELoss(0.1, margin=0.0, normalize=True)
    truth = mb.InfoNCELoss(0.1, margin=0.0)
    normalised = {name: torch.nn.functional.normalize(g, dim=1) for name, g in guides.items()}
    value = ours(lengths * query[:6], positive[:6], **guides)
    torch.testing.assert_close(value, truth(query[:6], positive[:6], **normalised))


@pytest.mark.parametrize("guided", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_copies_of_the_positive_are_not_excluded(dtype: torch.dtype, guided: bool) -> None:
    """At a margin of 0 they lie on the limit, and rounding puts them on either side of it."""
    b, d = 200, 384
    query = torch.nn.functional.normalize(torch.randn(b, d), dim=1).to(dtype)
    positive = query[:1].expand(b, d)
    features, guides = (query, positive), {}
    if guided:
        features = query[:, :8], query[:, 8:16]
        guides = {"guide_query": query, "guide_positive": positive}
    value = mb.InfoNCELoss(1.0, margin=0.0)(*features, **guides)
    torch.testing.assert_close(value, mb.InfoNCELoss(1.0)(*features), rtol=1e-6, atol=0)
    assert mb.InfoNCELoss(1.0, margin=-1e-5)(*features, **guides) == 0  # excludes all


X = torch.randn(6, 4)
GUIDES = {"guide_query": X, "guide_positive": X}
HARD: dict[str, Any] = {"hardness_mode": "hard_negatives"}


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"positive": X[:5]}, ValueError, ("positive", "6 rows", "5")),
        ({"query": X[:0], "positive": X[:0]}, ValueError, ("query", "one row", "0")),
        ({"query": [1]}, TypeError, ("query", "list")),
        ({"negatives": X[0]}, ValueError, ("negatives", "(k, d)", "(b, k, d)", "(4,)")),
        ({"negatives": [X]}, TypeError, ("negatives", "list")),
        ({"negatives": X[:, :3]}, ValueError, ("negatives", "width 4", "3")),
        ({"negatives": X.double()}, TypeError, ("negatives", "float64")),
        ({"negatives": X[:5, None]}, ValueError, ("negatives", "6 rows", "5")),
        ({"queue": X[:, :2]}, ValueError, ("queue", "width 4", "2")),
        ({"queue": X[0]}, ValueError, ("queue", "(4,)")),
        ({"ids": torch.arange(5)}, ValueError, ("ids", "(6,)", "(5,)")),
        ({"weights": torch.ones(7)}, ValueError, ("weights", "(6,)", "(7,)")),
        ({"temperature": 0.0}, ValueError, ("temperature", "positive", "0.0")),
        ({"temperature": torch.ones(3)}, ValueError, ("temperature", "(3,)")),
        ({"guide_query": X}, ValueError, ("guide_positive", "guide's features", "None")),
        ({"guide_positive": X}, ValueError, ("guide_query", "guide's features", "None")),
        (GUIDES | {"negatives": X}, ValueError, ("guide_negatives", "None")),
        (GUIDES | {"guide_queue": X}, ValueError, ("guide_queue", "None without queue")),
        (GUIDES | {"guide_positive": X[:, :3]}, ValueError, ("guide_positive", "width 4", "3")),
        (GUIDES | {"guide_query": X[1:]}, ValueError, ("guide_query", "(6, d')", "(5, 4)")),
        (GUIDES | {"guide_query": [1]}, TypeError, ("guide_query", "(6, d')", "list")),
        (GUIDES | {"guide_positive": X.double()}, TypeError, ("guide_positive", "float64")),
        (
            GUIDES | {"negatives": X[:, None], "guide_negatives": X},
            ValueError,
            ("guide_negatives", "(6, 1, d')", "(6, 4)"),
        ),
    ],
)
def test_bad_arguments(arguments: Any, error: type, words: tuple[str, ...]) -> None:
    with pytest.raises(error) as caught:
        mb.InfoNCELoss(0.1, margin=0.0)(**({"query": X, "positive": X} | arguments))
    assert all(word in str(caught.value) for word in words)


def test_a_guide_needs_a_margin() -> None:
    with pytest.raises(ValueError, match=r"margin: expected a number .* guide, got None"):
        mb.InfoNCELoss(0.1)(X, X, **GUIDES)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"temperature": -1}, ValueError, ("temperature", "-1")),
        ({"temperature": "x"}, TypeError, ("temperature", "str")),
        ({"temperature": float("inf")}, ValueError, ("temperature", "inf")),
        ({"temperature": torch.tensor(1)}, TypeError, ("temperature", "int64")),
        ({"margin": "0.1"}, TypeError, ("margin", "str")),
        ({"margin": float("nan")}, ValueError, ("margin", "nan")),
        ({"margin_strategy": "share"}, ValueError, ("margin_strategy", "relative", "'share'")),
        ({"same_tower": "query"}, TypeError, ("same_tower", "'query'")),
        ({"same_tower": ("document",)}, ValueError, ("same_tower", "document", "positive")),
        ({"label_smoothing": 1.0}, ValueError, ("label_smoothing", "below 1", "1.0")),
        ({"tau_plus": -0.1}, ValueError, ("tau_plus", "0 to below 1", "-0.1")),
        ({"reverse": "both"}, ValueError, ("reverse", "joint, separate", "'both'")),
        (
            {"reverse": "separate", "same_tower": ("query",)},
            ValueError,
            ("reverse", "same_tower", "'separate'"),
        ),
        ({"share_negatives": 1}, TypeError, ("share_negatives", "True or False", "1")),
        ({"hardness_mode": "hard"}, ValueError, ("hardness_mode", "hard_negatives", "'hard'")),
        ({"hardness_strength": 1}, ValueError, ("hardness_strength", "None", "1")),
        (HARD | {"hardness_strength": -1}, ValueError, ("hardness_strength", "-1")),
        (HARD | {"hardness_strength": None}, TypeError, ("hardness_strength", "NoneType")),
    ],
)
def test_bad_constructions(options: Any, error: type, words: tuple[str, ...]) -> None:
    with pytest.raises(error) as caught:
        mb.InfoNCELoss(**({"temperature": 0.1} | options))
    assert all(word in str(caught.value) for word in words)
