"""The losses equal pytorch-metric-learning's own, also in its wrappers, miners and reducers."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.losses.reference import assert_equal
from tests.losses.test_everywhere import Largest
from tests.similarity.distributed.processes import World

library = pytest.importorskip("pytorch_metric_learning")
ours = pytest.importorskip("megabatch.integrations.pytorch_metric_learning")
from pytorch_metric_learning import distances, losses, miners, reducers, regularizers  # noqa: E402

NAMES = pytest.mark.parametrize("name", ["SupConLoss", "NTXentLoss"])
D = 4
#: With a negative label, which is as any other here, one of a single row, and large ones.
LABELS = torch.tensor([0, 0, 0, 1, 1, -1, -1, 2, 3, 3, 3, 3, 1 << 40])
OTHERS = torch.tensor([3, 0, 5, -1, 1, 1, 0, 1 << 40])


def rows(n: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, D, generator=generator, dtype=torch.float64)


def both(name: str, **arguments: Any) -> tuple[Any, Any]:
    return getattr(ours, name)(**arguments), getattr(losses, name)(**arguments)


def test_a_release_with_another_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    """3.0 has `utils.indexing` instead."""
    monkeypatch.delattr(library.utils, "loss_and_miner_utils")
    monkeypatch.setitem(sys.modules, "pytorch_metric_learning.utils.loss_and_miner_utils", None)
    monkeypatch.delitem(sys.modules, ours.__name__)
    with pytest.raises(ImportError, match=r"below 3.*: pip install 'pytorch-metric-learning>=2.5"):
        importlib.import_module(ours.__name__)


# --- value and gradients --------------------------------------------------------------------------


@NAMES
@pytest.mark.parametrize("temperature", [None, 0.02, 1.0])
@pytest.mark.parametrize(
    "labels",
    [LABELS, LABELS.int(), torch.arange(13), torch.zeros(13).long(), torch.arange(13) // 12],
    ids=["some", "int32", "no positive", "no negative", "one positive pair"],
)
def test_labels(name: str, temperature: float | None, labels: Tensor) -> None:
    arguments = {} if temperature is None else {"temperature": temperature}
    mine, own = both(name, **arguments)
    assert isinstance(mine, type(own))
    assert_equal(lambda x: mine(x, labels), lambda x: own(x, labels), rows(13))


@NAMES
def test_references(name: str) -> None:
    mine, own = both(name)
    x, y = rows(13), rows(8, 1)
    for labels in (OTHERS, torch.full((8,), 9)):
        f, g = (partial(loss, labels=LABELS, ref_labels=labels) for loss in (mine, own))
        assert_equal(lambda x, y, f=f: f(x, ref_emb=y), lambda x, y, g=g: g(x, ref_emb=y), x, y)
    # With the embeddings as references and their own labels, pairs (i, i) are positives.
    f, g = (partial(loss, labels=LABELS, ref_labels=LABELS.clone()) for loss in (mine, own))
    assert_equal(lambda x: f(x, ref_emb=x), lambda x: g(x, ref_emb=x), x)


# --- options of the library -----------------------------------------------------------------------

#: Arguments of a loss, made for each one anew.
OPTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "mean": lambda: {"reducer": reducers.MeanReducer()},
    "mean, statistics": lambda: {"reducer": reducers.MeanReducer(collect_stats=True)},
    "not zero": lambda: {"reducer": reducers.AvgNonZeroReducer()},
    "sum": lambda: {"reducer": reducers.SumReducer()},
    "threshold": lambda: {"reducer": reducers.ThresholdReducer(low=0.5, high=3.0)},
    "classes": lambda: {"reducer": reducers.ClassWeightedReducer(torch.linspace(1, 2, 5))},
    "anchors": lambda: {"reducer": reducers.PerAnchorReducer()},
    "several": lambda: {"reducer": reducers.MultipleReducers({"loss": reducers.SumReducer()})},
    "regularizer": lambda: {
        "embedding_regularizer": regularizers.LpRegularizer(),
        "embedding_reg_weight": 0.3,
    },
    **{
        f"products, {normalize}": lambda normalize=normalize: {
            "distance": distances.DotProductSimilarity(normalize_embeddings=normalize)
        }
        for normalize in (False, True)
    },
    "cosines, statistics": lambda: {"distance": distances.CosineSimilarity(collect_stats=True)},
}


@NAMES
@pytest.mark.parametrize("option", OPTIONS)
def test_options(name: str, option: str) -> None:
    """Reducers, a regularizer and distances, with the statistics that they collect."""
    labels = torch.arange(13) % 5
    mine, own = (kind(temperature=0.3, **OPTIONS[option]()) for kind in map(type, both(name)))
    assert_equal(lambda x: mine(x, labels), lambda x: own(x, labels), rows(13))
    assert mine.sub_loss_names() == own.sub_loss_names()
    if option == "mean, statistics":
        assert mine.reducer.losses_size == own.reducer.losses_size > 1
    if option == "cosines, statistics":
        for statistic in ("initial_avg_query_norm", "final_avg_ref_norm"):
            found, expected = (getattr(loss.distance, statistic) for loss in (mine, own))
            assert found == pytest.approx(expected)
        assert found == pytest.approx(1)


# --- wrappers and miners --------------------------------------------------------------------------


@NAMES
@pytest.mark.parametrize("symmetric", [True, False])
def test_in_self_supervised_loss(name: str, symmetric: bool) -> None:
    mine, own = (losses.SelfSupervisedLoss(loss, symmetric=symmetric) for loss in both(name))
    assert_equal(mine, own, rows(6), rows(6, 1))


@NAMES
def test_listed_pairs_give_the_librarys_own_loss(name: str) -> None:
    """Of miners, with labels or instead of them, and of a memory that wraps around its end."""
    mine, own = both(name)
    for miner in (miners.MultiSimilarityMiner(epsilon=0.5), miners.TripletMarginMiner(0.4)):
        pairs = miner(rows(13), LABELS)
        assert len(pairs[0]) > 3
        for labels in (LABELS, None):
            f, g = (partial(loss, labels=labels, indices_tuple=pairs) for loss in (mine, own))
            assert_equal(f, g, rows(13))
        memories = [losses.CrossBatchMemory(loss, D, 20, miner) for loss in (mine, own)]
        for step in range(4):
            f, g = (partial(memory, labels=torch.arange(8) * 3 % 5 + step) for memory in memories)
            assert_equal(f, g, rows(8, step))
    other = rows(13, 1)  # with the labels themselves the library leaves out the pairs (i, i)
    f, g = (partial(loss, labels=LABELS, ref_emb=other, ref_labels=LABELS) for loss in (mine, own))
    assert_equal(f, g, rows(13))


def on_two_the_distributed_wrapper(world: World) -> None:
    from pytorch_metric_learning.utils.distributed import DistributedLossWrapper

    for name, efficient in (("SupConLoss", False), ("NTXentLoss", False), ("NTXentLoss", True)):
        found = []
        for loss in both(name):
            x = world.shard(rows(12), [6, 6]).requires_grad_()
            value = DistributedLossWrapper(loss, efficient)(x, world.shard(LABELS[:12], [6, 6]))
            value.backward()
            found.append((value.detach(), x.grad))
        torch.testing.assert_close(*found)


# --- memory, dtypes, errors -----------------------------------------------------------------------


@NAMES
def test_no_matrix_is_formed(name: str, small_blocks: None) -> None:
    b, d = 512, 8
    x = torch.randn(b, d, requires_grad=True)
    with Largest() as largest:
        getattr(ours, name)()(x, torch.arange(b) // 3).backward()
    assert largest.elements <= 4 * b * d < b * b / 8


@NAMES
def test_half_precision_gives_a_float32_loss(name: str) -> None:
    x = rows(13).bfloat16().requires_grad_()
    mine, own = both(name)
    value = mine(x, LABELS)
    value.backward()
    assert value.dtype == torch.float32
    assert x.grad.dtype == torch.bfloat16
    torch.testing.assert_close(value.double(), own(x.double(), LABELS), rtol=0.01, atol=0.01)


@NAMES
def test_refusals(name: str) -> None:
    kind, x = getattr(ours, name), rows(13)
    for distance, came in (
        (distances.LpDistance(), "LpDistance"),
        (distances.SNRDistance(), "SNRDistance"),
        (distances.CosineSimilarity(power=2), r"CosineSimilarity\(p=2, power=2\)"),
        (distances.CosineSimilarity(p=1), r"CosineSimilarity\(p=1, power=1\)"),
    ):
        with pytest.raises(ValueError, match=f"distance: expected CosineSimilarity.*got {came}"):
            kind(distance=distance)
    with pytest.raises(ValueError, match="temperature: expected a positive"):
        kind(temperature=0.0)
    with pytest.raises(ValueError, match="expected width 4"):
        kind()(x, LABELS, ref_emb=x[:, :3], ref_labels=LABELS.clone())
