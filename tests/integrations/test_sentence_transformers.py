"""The ranking losses have the values and gradients of sentence-transformers' that they replace."""

from __future__ import annotations

import importlib
import runpy
import sys
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.integrations.sentence_encoders import (
    OTHER_DIRECTIONS,
    SYMMETRIC,
    WIDTH,
    bert,
    colbert,
    different_lengths,
    embeddings,
    library,
    loss_and_gradients,
    modules,
    multi_vector,
    own_multi_vector_loss,
    scores_in_float64,
    step,
    without_dropout,
)

util: Any = library.util
transformers: Any = pytest.importorskip("transformers")
losses: Any = importlib.import_module("sentence_transformers.sentence_transformer.losses")

from megabatch.integrations import sentence_transformers as integration  # noqa: E402
from megabatch.integrations.cached_losses import sorted_by_length  # noqa: E402
from megabatch.integrations.sentence_transformers import (  # noqa: E402
    MegabatchGISTEmbedLoss,
    MegabatchMultiVectorRankingLoss,
    MegabatchRankingLoss,
    UncachedMegabatchRankingLoss,
)

TERMS = [
    (("query_to_doc", *others), "joint")
    for count in range(4)
    for others in combinations(OTHER_DIRECTIONS, count)
] + [(("query_to_doc",), "per_direction"), (SYMMETRIC, "per_direction")]
HARDNESS = [None, "in_batch_negatives", "hard_negatives", "all_negatives"]


@pytest.fixture
def model(folder: Path) -> Any:
    return bert(folder)


def test_a_release_that_computes_the_loss_elsewhere(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own loss would pair texts that were sorted column by column."""
    own = losses.CachedMultipleNegativesRankingLoss
    monkeypatch.setattr(own, "forward", lambda self, features, labels: torch.zeros(()))
    loss = MegabatchRankingLoss(model)
    with pytest.raises(RuntimeError, match="MegabatchRankingLoss: this release of sentence-tr"):
        loss([{}, {}])


# --- the loss of embeddings -----------------------------------------------------------------------


@pytest.mark.parametrize("hardness_mode", HARDNESS)
@pytest.mark.parametrize(("directions", "partition_mode"), TERMS)
def test_value_and_gradients_are_the_librarys(
    directions: tuple[str, ...], partition_mode: str, hardness_mode: str | None
) -> None:
    settings = {
        "scale": 7.0,
        "directions": directions,
        "partition_mode": partition_mode,
        "hardness_mode": hardness_mode,
        "hardness_strength": 3.0,
    }
    for similarity_fct, rows, columns in (
        (util.cos_sim, 5, 4),
        (util.dot_score, 5, 2),
        (util.cos_sim, 1, 3),
    ):
        batch = embeddings(rows, columns)
        found, expected = (
            loss_and_gradients(kind(nn.Module(), similarity_fct=similarity_fct, **settings), batch)
            for kind in (UncachedMegabatchRankingLoss, losses.MultipleNegativesRankingLoss)
        )
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("contrast", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize(
    ("margin_strategy", "margin"), [("absolute", 0.0), ("absolute", 0.3), ("relative", 0.1)]
)
def test_guided_value_and_gradients_are_the_librarys(
    margin_strategy: str, margin: float, contrast: tuple[bool, bool], model: Any
) -> None:
    settings: dict[str, Any] = {
        "margin_strategy": margin_strategy,
        "margin": margin,
        "contrast_anchors": contrast[0],
        "contrast_positives": contrast[1],
        "temperature": 0.2,
    }
    for rows, columns in ((7, 2), (7, 4)):
        # The guide's features of a query and its documents are similar, or most negatives drop out.
        common = 2 * embeddings(rows + 1, 1)[0][:rows]
        guides = [[common + own] for own in embeddings(rows, columns)]
        results = []
        for kind in (MegabatchGISTEmbedLoss, losses.CachedGISTEmbedLoss):
            batch = [[column.requires_grad_()] for column in embeddings(rows, columns)]
            loss = kind(model, model, **settings)
            value = loss.calculate_loss(batch, guides, with_backward=True)
            results.append([value, *(column.grad for (column,) in batch)])
        torch.testing.assert_close(*results, rtol=1e-10, atol=1e-12)


def test_other_similarities_and_single_columns_are_refused(model: Any) -> None:
    for kind in (MegabatchRankingLoss, UncachedMegabatchRankingLoss):
        with pytest.raises(ValueError, match="similarity_fct: expected cos_sim or dot_score"):
            kind(model, similarity_fct=util.euclidean_sim)
        loss: Any = kind(model)
        with pytest.raises(ValueError, match="xpected"):
            loss([model.preprocess(["a b"])], None)
        loss.similarity_fct = util.manhattan_sim
        with pytest.raises(ValueError, match="got manhattan_sim"):
            loss([model.preprocess(["a b"]), model.preprocess(["c"])], None)


# --- sparse encoders ------------------------------------------------------------------------------


def splade(folder: Path) -> Any:
    """A sparse encoder, in training mode and without dropout, as its pooling works in place."""
    sparse = importlib.import_module("sentence_transformers.sparse_encoder")
    config = transformers.AutoConfig.from_pretrained(folder / "bert")
    torch.manual_seed(0)
    transformers.BertForMaskedLM(config).save_pretrained(folder / "masked")
    bert(folder).tokenizer.save_pretrained(folder / "masked")
    words = sparse.modules.MLMTransformer(str(folder / "masked"))
    parts = [words, sparse.modules.SpladePooling("max")]
    return without_dropout(sparse.SparseEncoder(modules=parts, device="cpu").double())


@pytest.mark.parametrize("wrapper", ["SpladeLoss", "CachedSpladeLoss"])
def test_losses_of_sparse_encoders_take_it(wrapper: str, folder: Path) -> None:
    sparse = importlib.import_module("sentence_transformers.sparse_encoder.losses")
    plain: dict[str, Any] = {"scale": 1.0, "similarity_fct": util.dot_score}
    own = sparse.SparseMultipleNegativesRankingLoss
    results = []
    for kind, settings in ((UncachedMegabatchRankingLoss, plain), (own, {})):
        model = splade(folder)
        loss = getattr(sparse, wrapper)(model, kind(model, **settings), 0.1, 0.2)
        value = sum(loss(different_lengths(model), None).values())
        value.backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        results.append([value.detach(), *gradients])
    assert max(gradient.abs().max() for gradient in results[0][1:]) > 1e-3
    torch.testing.assert_close(*results, rtol=1e-10, atol=1e-12)


# --- texts in order of their lengths --------------------------------------------------------------


@pytest.mark.parametrize("settings", [{"mini_batch_size": 2}, {"mini_batch_num_tokens": 12}])
def test_sorted_texts_give_the_librarys_loss_and_gradients(
    model: Any, folder: Path, settings: dict[str, int]
) -> None:
    if "mini_batch_num_tokens" in settings and library.__version__ < "6":
        pytest.skip("the library counts no tokens before 6.0")
    model.double().eval()
    guide = bert(folder).double().eval()
    columns = different_lengths(model)
    encoded: list[Tensor] = []
    model[0].register_forward_pre_hook(lambda _, args: encoded.append(args[0]["attention_mask"]))
    for mine, theirs, arguments in (
        (MegabatchRankingLoss, losses.CachedMultipleNegativesRankingLoss, (model,)),
        (MegabatchGISTEmbedLoss, losses.CachedGISTEmbedLoss, (model, guide)),
    ):
        expected = step(theirs(*arguments, **settings), model, columns)
        encoded.clear()
        unsorted = step(mine(*arguments, **settings, sort_by_length=False), model, columns)
        tokens = sum(mask.numel() for mask in encoded)
        encoded.clear()
        found = step(mine(*arguments, **settings), model, columns)
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(unsorted, expected, rtol=1e-10, atol=1e-12)
        lengths = encoded[0].sum(1).tolist()
        assert lengths == sorted(lengths, reverse=True)
        assert lengths[0] == max(columns[0]["attention_mask"].sum(1))
        # Releases from 6.0 on cut mini-batches to their longest text.
        if library.__version__ >= "6" and "mini_batch_size" in settings:
            assert sum(mask.numel() for mask in encoded) < 0.9 * tokens
        if limit := settings.get("mini_batch_num_tokens"):
            assert all(mask.numel() <= limit or len(mask) == 1 for mask in encoded)


@pytest.mark.skipif(library.__version__ < "6", reason="says no ranges before 6.0")
@pytest.mark.parametrize("kept", [1, 100])
@pytest.mark.parametrize("settings", [{"mini_batch_size": 2}, {"mini_batch_num_tokens": 12}])
def test_kept_mini_batches_change_nothing_but_are_encoded_once(
    model: Any, settings: dict[str, int], kept: int
) -> None:
    model.train()  # with dropout
    columns, passes = different_lengths(model), list[bool]()
    model[0].register_forward_pre_hook(lambda *_: passes.append(torch.is_grad_enabled()))
    results, mini_batches = [], 0
    for count in (0, kept):
        passes.clear()
        torch.manual_seed(0)
        loss = MegabatchRankingLoss(model, **settings, kept_mini_batches=count)
        results.append(step(loss, model, columns))
        mini_batches = mini_batches or len(passes) // 3  # the last pass evaluates
    # The value, and all gradients. Evaluation follows with other random numbers.
    for one, two in zip(*results, strict=True):
        assert one is results[0][1] or torch.equal(one, two)
    once = min(kept * len(columns), mini_batches)
    assert (len(passes), passes.count(True)) == (3 * mini_batches - once, mini_batches)


@pytest.mark.skipif(library.__version__ < "6", reason="says no ranges before 6.0")
def test_a_second_backward_pass_encodes_kept_mini_batches_again(model: Any) -> None:
    model.train()
    columns, gradients = different_lengths(model), []
    loss = MegabatchRankingLoss(model, mini_batch_size=2, kept_mini_batches=2)
    value = loss([dict(column) for column in columns], None)
    for _ in range(2):
        value.backward()
        parts = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
        gradients.append(torch.cat(parts).clone())
    torch.testing.assert_close(gradients[1], 2 * gradients[0], rtol=1e-4, atol=1e-7)


@pytest.mark.skipif(library.__version__ < "6", reason="says no ranges before 6.0")
def test_kept_mini_batches_with_a_static_graph_are_refused(model: Any) -> None:
    loss = MegabatchRankingLoss(model, mini_batch_size=2, kept_mini_batches=2)
    wrapped: Any = DistributedDataParallel.__new__(DistributedDataParallel)
    nn.Module.__init__(wrapped)
    wrapped.static_graph, loss.model = True, wrapped
    with pytest.raises(ValueError, match=r"expected 0 with DDP's static graph, got 2$"):
        loss(different_lengths(model), None)


def test_wrong_numbers_of_kept_mini_batches(
    model: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for wrong in (-1, 1.5, "2"):
        with pytest.raises(ValueError, match=f"integer from 0 on, got {wrong!r}$"):
            MegabatchRankingLoss(model, kept_mini_batches=wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="kept_mini_batches: expected 0 with a guide model, got 1"):
        MegabatchGISTEmbedLoss(model, bert(folder), kept_mini_batches=1)
    theirs = losses.CachedMultipleNegativesRankingLoss
    monkeypatch.setattr(theirs, "embed_minibatch_iter", lambda self, features: None)
    with pytest.raises(ValueError, match="kept_mini_batches: expected 0 with sentence-transf"):
        MegabatchRankingLoss(model, kept_mini_batches=1)


def test_texts_are_sorted_where_padding_is_masked(model: Any, folder: Path) -> None:
    assert MegabatchRankingLoss(model).sort_by_length
    assert MegabatchGISTEmbedLoss(model, bert(folder)).sort_by_length
    assert not MegabatchRankingLoss(model, sort_by_length=False).sort_by_length
    if library.__version__ >= "6":
        assert MegabatchMultiVectorRankingLoss(colbert(folder)).sort_by_length
    convolution = library.SentenceTransformer(
        modules=[model[0], modules.CNN(WIDTH, WIDTH), modules.Pooling(WIDTH)], device="cpu"
    )
    assert not MegabatchRankingLoss(convolution).sort_by_length
    assert MegabatchRankingLoss(convolution, sort_by_length=True).sort_by_length


def test_other_inputs_than_rows_of_tokens_are_not_sorted(model: Any) -> None:
    texts = model.preprocess(["a b c", "d"])
    flat = {key: value.reshape(1, -1) for key, value in texts.items() if isinstance(value, Tensor)}
    del flat["attention_mask"]
    pictures = {**texts, "pixel_values": torch.zeros(2, 3, 4, 4)}
    for features in (flat, pictures):
        assert sorted_by_length(features) == (features, None)


# --- multi-vector encoders ------------------------------------------------------------------------


@multi_vector
@scores_in_float64
@pytest.mark.parametrize(
    ("columns", "scores", "settings"),
    [
        (3, "colbert_scores", {"mini_batch_size": 2}),
        (2, "mean_colbert_scores", {"mini_batch_num_tokens": 20, "scale": 3.0}),
    ],
)
def test_multi_vector_loss_and_gradients_are_the_librarys(
    columns: int, scores: str, settings: dict[str, Any], folder: Path
) -> None:
    model = without_dropout(colbert(folder).double())
    batch = different_lengths(model, task="query")[:columns]
    assert batch[0]["query_expansion_positions"].any()
    settings |= {"similarity_fct": getattr(library.multi_vector_encoder.scoring, scores)}
    results = []
    for kind in (MegabatchMultiVectorRankingLoss, own_multi_vector_loss):
        loss = kind(model, **settings)
        results.append(step(loss, model, batch))
        results[-1] += step(losses.MatryoshkaLoss(model, loss, [WIDTH, 6]), model, batch)
    torch.testing.assert_close(*results, rtol=1e-10, atol=1e-12)


@multi_vector
def test_other_scores_and_single_columns_of_tokens_are_refused(folder: Path) -> None:
    model = colbert(folder)
    with pytest.raises(ValueError, match=r"expected colbert_scores or.*got cos_sim"):
        MegabatchMultiVectorRankingLoss(model, similarity_fct=util.cos_sim)
    with pytest.raises(ValueError, match="expected queries, positives and any negatives, got 1"):
        MegabatchMultiVectorRankingLoss(model)([model.preprocess(["a b"])])


def test_a_release_without_multi_vector_encoders(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "sentence_transformers.multi_vector_encoder", None)
    names = runpy.run_path(integration.__file__)
    assert names["MegabatchRankingLoss"](model).scale == 20
    with pytest.raises(ImportError, match="expected sentence-transformers 6"):
        names["MegabatchMultiVectorRankingLoss"](model)
