"""The ranking losses train as those of sentence-transformers that they replace."""

from __future__ import annotations

import functools
import importlib
import json
import multiprocessing
import os
import traceback
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megabatch.training.world import leave
from tests.gradient_cache.test_trainers import options, pretend_torchrun, weights_of
from tests.models.tiny_bert import save_tiny_bert
from tests.similarity.distributed.processes import forked, new_store

library: Any = pytest.importorskip("sentence_transformers", minversion="5.4")
datasets: Any = pytest.importorskip("datasets")
transformers: Any = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
util: Any = library.util
losses: Any = importlib.import_module("sentence_transformers.sentence_transformer.losses")
modules: Any = importlib.import_module("sentence_transformers.sentence_transformer.modules")

from megabatch.integrations.sentence_transformers import (  # noqa: E402
    MegabatchGISTEmbedLoss,
    MegabatchRankingLoss,
    UncachedMegabatchRankingLoss,
    _sorted_by_length,
)

OTHER_DIRECTIONS = ["query_to_query", "doc_to_query", "doc_to_doc"]
SYMMETRIC = ("query_to_doc", "doc_to_query")
EVERY_DIRECTION = ("query_to_doc", *OTHER_DIRECTIONS)
TERMS = [
    (("query_to_doc", *others), "joint")
    for count in range(4)
    for others in combinations(OTHER_DIRECTIONS, count)
] + [(("query_to_doc",), "per_direction"), (SYMMETRIC, "per_direction")]
HARDNESS = [None, "in_batch_negatives", "hard_negatives", "all_negatives"]
SAMPLES, BATCH, WIDTH = 16, 4, 16


# --- the loss of embeddings -----------------------------------------------------------------------


def loss_and_gradients(loss: Any, columns: list[Tensor]) -> list[Tensor]:
    embeddings = [column.clone().requires_grad_() for column in columns]
    value = loss.compute_loss_from_embeddings(embeddings, None)
    return [value.detach(), *torch.autograd.grad(value, embeddings)]


def embeddings(rows: int, columns: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rows)
    return list(torch.randn(columns, rows, 6, generator=generator, dtype=torch.float64))


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


def test_other_similarities_are_refused(model: Any) -> None:
    for kind in (MegabatchRankingLoss, UncachedMegabatchRankingLoss):
        with pytest.raises(ValueError, match="similarity_fct: expected cos_sim or dot_score"):
            kind(model, similarity_fct=util.euclidean_sim)
        loss: Any = kind(model)
        loss.similarity_fct = util.manhattan_sim
        with pytest.raises(ValueError, match="got manhattan_sim"):
            loss([model.preprocess(["a b"]), model.preprocess(["c"])], None)


def test_wrong_settings_and_columns_are_refused_as_by_the_library(model: Any) -> None:
    with pytest.raises(ValueError, match="'query_to_doc' direction is required"):
        MegabatchRankingLoss(model, directions=("doc_to_query",))
    with pytest.raises(TypeError, match="margin"):
        MegabatchRankingLoss(model, margin=0.1)
    for kind in (MegabatchRankingLoss, UncachedMegabatchRankingLoss):
        with pytest.raises(ValueError, match="xpected"):
            kind(model)([model.preprocess(["a b"])], None)


# --- training -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sentence-transformers")
    save_tiny_bert(folder / "bert")
    return folder


@pytest.fixture
def model(folder: Path) -> Any:
    return bert(folder)


def bert(folder: Path) -> Any:
    """A sentence encoder with dropout."""
    torch.manual_seed(0)
    parts = [modules.Transformer(str(folder / "bert")), modules.Pooling(WIDTH)]
    return library.SentenceTransformer(modules=parts, device="cpu")


def static(folder: Path) -> Any:
    """A sentence encoder of word embeddings alone."""
    torch.manual_seed(0)
    tokenizer = bert(folder).tokenizer.backend_tokenizer
    words = modules.StaticEmbedding(tokenizer, embedding_dim=WIDTH)
    return library.SentenceTransformer(modules=[words], device="cpu")


def texts(columns: int) -> Any:
    """Samples of an anchor, a positive and any negatives."""
    letters = "abcdefgh"
    names = ["anchor", "positive", "negative_1", "negative_2"][:columns]
    words = [f"{letters[i % 8]} {letters[i // 8]}" for i in range(SAMPLES)]
    endings = ["", " h h", " a", " c d e"]
    return datasets.Dataset.from_dict(
        {
            name: [words[i - shift] + ending for i in range(SAMPLES)]
            for name, ending, shift in zip(names, endings, (0, 0, 3, 5), strict=False)
        }
    )


def train(
    folder: Path, model: Any, make_loss: Callable[[Any], Any], data: Any, **arguments: Any
) -> Any:
    # Without clipping, SGD's steps are proportional to the gradients and show a wrong factor.
    plain = {"optim": "sgd", "learning_rate": 0.02, "max_grad_norm": 1000.0}
    settings = options(folder / "run") | plain | arguments
    trainer = library.SentenceTransformerTrainer(
        model,
        library.SentenceTransformerTrainingArguments(**settings),
        train_dataset=data,
        eval_dataset=data,
        loss=make_loss(model),
    )
    trainer.train()
    return trainer


def train_both(
    folder: Path,
    make_loss: Callable[[Any, Any], Any],
    data: Any,
    *,
    loss_classes: tuple[Any, Any] = (
        MegabatchRankingLoss,
        losses.CachedMultipleNegativesRankingLoss,
    ),
    make_model: Callable[[Path], Any] = bert,
    tolerance: float = 1e-5,
    **arguments: Any,
) -> None:
    """Train with each loss; assert equal weights and evaluations, and that weights have moved.

    tolerance: of weights, relative to the largest of a tensor, which may be much larger than 1.
    """
    before = weights_of(make_model(folder))
    weights, evaluations = [], []
    for loss_class in loss_classes:
        make = functools.partial(make_loss, loss_class)
        trainer = train(folder, make_model(folder), make, data, **arguments)
        weights.append(weights_of(trainer.model))
        evaluations.append({k: v for k, v in trainer.evaluate().items() if k.endswith("_loss")})
    found, expected = weights
    assert max((found[name] - before[name]).abs().max().item() for name in before) > 1e-3
    for name, value in found.items():
        atol = tolerance * max(1.0, expected[name].abs().max().item())
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=atol, msg=name)
    assert evaluations[0] == pytest.approx(evaluations[1], rel=10 * tolerance)


def ranking_loss(settings: dict[str, Any], kind: Any, model: Any) -> Any:
    return kind(model, **settings)


def test_trains_as_the_library_does(folder: Path) -> None:
    settings = {
        "mini_batch_size": 3,
        "directions": EVERY_DIRECTION,
        "hardness_mode": "in_batch_negatives",
        "hardness_strength": 5.0,
    }
    train_both(folder, functools.partial(ranking_loss, settings), texts(4))


def test_trains_as_the_library_does_inside_matryoshka_loss(folder: Path) -> None:
    def matryoshka(kind: Any, model: Any) -> Any:
        loss = kind(model, mini_batch_size=3)
        return losses.MatryoshkaLoss(model, loss, [WIDTH, 6], [1, 0.5])

    train_both(folder, matryoshka, texts(2))


def test_trains_as_the_library_does_on_several_datasets(folder: Path) -> None:
    def each(kind: Any, model: Any) -> Any:
        symmetric = {"directions": SYMMETRIC, "partition_mode": "per_direction"}
        return {"a": kind(model, mini_batch_size=2, **symmetric), "b": kind(model, scale=50)}

    train_both(folder, each, datasets.DatasetDict({"a": texts(2), "b": texts(3)}))


def test_trains_as_the_library_does_in_bfloat16_with_checkpointing(folder: Path) -> None:
    def checkpointed(folder: Path) -> Any:
        model = bert(folder)
        model[0].auto_model.gradient_checkpointing_enable()
        return model

    cached = functools.partial(ranking_loss, {"mini_batch_size": 3})
    # Older trainers compute the loss under autocast, where the library rounds scores to bfloat16.
    tolerance = 1e-5 if int(transformers.__version__.partition(".")[0]) >= 5 else 0.03
    train_both(folder, cached, texts(2), make_model=checkpointed, bf16=True, tolerance=tolerance)


def guided(guide: Any, kind: Any, model: Any) -> Any:
    return kind(model, guide, mini_batch_size=3, margin=0.05, gather_across_devices=True)


def test_trains_as_the_library_does_with_a_guide(folder: Path) -> None:
    loss_classes = MegabatchGISTEmbedLoss, losses.CachedGISTEmbedLoss

    def matryoshka(kind: Any, model: Any) -> Any:
        return losses.MatryoshkaLoss(model, guided(bert(folder), kind, model), [WIDTH, 6])

    train_both(folder, matryoshka, texts(3), loss_classes=loss_classes)


def test_trains_as_the_library_does_without_caching(folder: Path) -> None:
    loss_classes = UncachedMegabatchRankingLoss, losses.MultipleNegativesRankingLoss

    def matryoshka(kind: Any, model: Any) -> Any:
        return losses.MatryoshkaLoss(model, kind(model), [WIDTH, 6])

    train_both(
        folder,
        functools.partial(ranking_loss, {}),
        texts(3),
        loss_classes=loss_classes,
        make_model=static,
    )
    train_both(folder, matryoshka, texts(2), loss_classes=loss_classes)


def test_static_embeddings_are_refused_with_caching(folder: Path) -> None:
    with pytest.raises(ValueError, match="StaticEmbedding"):
        MegabatchRankingLoss(static(folder))


def test_model_cards_cite_the_papers(folder: Path, model: Any) -> None:
    papers: dict[Any, str] = {
        MegabatchRankingLoss(model): "gao2021scaling",
        UncachedMegabatchRankingLoss(model): "oord2019",
        MegabatchGISTEmbedLoss(model, bert(folder)): "solatorio2024gistembed",
    }
    for loss, paper in papers.items():
        assert paper in loss.citation
        assert "cheng2024breaking" in loss.citation


def test_model_cards_show_the_loss(folder: Path, model: Any) -> None:
    loss = MegabatchRankingLoss(model, scale=30, directions=SYMMETRIC, mini_batch_size=3)
    theirs = losses.CachedMultipleNegativesRankingLoss(
        model, scale=30, directions=SYMMETRIC, mini_batch_size=3
    )
    assert loss.get_config_dict() == theirs.get_config_dict()
    trainer = train(folder, model, lambda _: loss, texts(2))
    trainer.create_model_card()
    card = (folder / "run" / "README.md").read_text()
    for part in (
        "megabatch.integrations.sentence_transformers.MegabatchRankingLoss",
        '"scale": 30',
        '"mini_batch_size": 3',
        "@misc{gao2021scaling",
        "@misc{cheng2024breaking",
    ):
        assert part in card


# --- texts in order of their lengths --------------------------------------------------------------


def different_lengths(model: Any) -> list[dict[str, Any]]:
    """Three columns of seven texts of one to nine words, in no order."""
    counts = [[1, 9, 2, 8, 3, 1, 5], [4, 1, 7, 2, 2, 6, 9], [1, 1, 2, 3, 1, 8, 1]]
    letters = 3 * "abcdefgh"
    texts = [[" ".join(letters[i : i + n]) for i, n in enumerate(column)] for column in counts]
    return [model.preprocess(column) for column in texts]


def step(loss: Any, model: Any, columns: list[dict[str, Any]]) -> list[Tensor]:
    """The loss, gradients of all weights, and the loss without gradients."""
    model.zero_grad()
    value = loss([dict(column) for column in columns], None)
    value.backward()
    gradients = [torch.zeros(()) if p.grad is None else p.grad for p in model.parameters()]
    with torch.no_grad():
        evaluated = loss([dict(column) for column in columns], None)
    return [value.detach(), evaluated, *(gradient.clone() for gradient in gradients)]


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


def test_sorted_texts_train_as_the_librarys_with_matryoshka_loss(folder: Path) -> None:
    words = ["a b c d e f g", "b", "c d", "a c e g b d f h", "f", "e f g", "g h", "h"]
    data = datasets.Dataset.from_dict(
        {"anchor": words * 2, "positive": words[3:] + words + ["a"] * 3}
    )

    def without_dropout(folder: Path) -> Any:
        model = bert(folder)
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
            if hasattr(module, "attention_probs_dropout_prob"):
                module.attention_probs_dropout_prob = 0.0
        return model

    def matryoshka(kind: Any, model: Any) -> Any:
        loss = kind(model, mini_batch_size=3)
        return losses.MatryoshkaLoss(model, loss, [WIDTH, 6], [1, 0.5])

    train_both(folder, matryoshka, data, make_model=without_dropout)


def test_texts_are_sorted_where_padding_is_masked(model: Any, folder: Path) -> None:
    assert MegabatchRankingLoss(model).sort_by_length
    assert MegabatchGISTEmbedLoss(model, bert(folder)).sort_by_length
    assert not MegabatchRankingLoss(model, sort_by_length=False).sort_by_length
    convolution = library.SentenceTransformer(
        modules=[model[0], modules.CNN(WIDTH, WIDTH), modules.Pooling(WIDTH)], device="cpu"
    )
    assert not MegabatchRankingLoss(convolution).sort_by_length
    model[0].auto_model.config.model_type = "fnet"
    assert not MegabatchRankingLoss(model).sort_by_length
    assert MegabatchRankingLoss(model, sort_by_length=True).sort_by_length


def test_other_inputs_than_rows_of_tokens_are_not_sorted(model: Any) -> None:
    texts = model.preprocess(["a b c", "d"])
    flat = {key: value.reshape(1, -1) for key, value in texts.items() if isinstance(value, Tensor)}
    del flat["attention_mask"]
    pictures = {**texts, "pixel_values": torch.zeros(2, 3, 4, 4)}
    for features in (flat, pictures):
        assert _sorted_by_length(features) == (features, None)


# --- two ranks ------------------------------------------------------------------------------------


def train_on_ranks(folder: Path) -> None:
    """Both losses on the ranks of one DistributedDataParallel model, gathering and not."""
    for gather_across_devices in (True, False):
        settings = {
            "mini_batch_size": 3,
            "gather_across_devices": gather_across_devices,
            "directions": EVERY_DIRECTION,
            "hardness_mode": "in_batch_negatives",
            "hardness_strength": 5.0,
        }
        make = functools.partial(ranking_loss, settings)
        train_both(folder, make, texts(3))
    if library.__version__ < "6":
        return  # the library compared the guide with the first rank's positives alone
    loss_classes = MegabatchGISTEmbedLoss, losses.CachedGISTEmbedLoss
    with_guide = functools.partial(guided, bert(folder))
    train_both(folder, with_guide, texts(3), loss_classes=loss_classes)


def compare_shards_of_different_sizes(rank: int) -> None:
    """The mean over ranks is the library's loss of the whole batch; all queries count alike."""
    settings: dict[str, Any] = {
        "directions": EVERY_DIRECTION,
        "hardness_mode": "hard_negatives",
        "hardness_strength": 3.0,
    }
    batch = embeddings(8, 4)
    expected, *gradients = loss_and_gradients(
        losses.MultipleNegativesRankingLoss(nn.Module(), **settings), batch
    )
    own = slice(0, 3) if rank == 0 else slice(3, 8)
    loss = UncachedMegabatchRankingLoss(nn.Module(), gather_across_devices=True, **settings)
    found, *own_gradients = loss_and_gradients(loss, [column[own] for column in batch])
    dist.all_reduce(found)
    torch.testing.assert_close(found / 2, expected)
    for column, gradient in zip(own_gradients, gradients, strict=True):
        torch.testing.assert_close(column / 2, gradient[own])


def fork_ranks(folder: Path, port: int) -> None:
    """Import the library, which takes seconds, and fork two ranks."""
    context: Any = multiprocessing.get_context("fork")
    ranks = [context.Process(target=run_rank, args=(rank, folder, port)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()


def run_rank(rank: int, folder: Path, port: int) -> None:
    torch.set_num_threads(1)
    pretend_torchrun(rank, 2)
    os.environ["MASTER_PORT"] = str(port)
    failure = ""
    try:
        train_on_ranks(folder)
        compare_shards_of_different_sizes(rank)
    except Exception:
        failure = traceback.format_exc()
    (folder / f"{rank}.json").write_text(json.dumps(failure))
    leave()


def test_two_ranks_train_as_the_librarys_do(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "bert").symlink_to(folder / "bert")
    store = new_store()
    process = forked(fork_ranks, tmp_path, store.port)
    process.join(240)
    process.kill()
    for rank in range(2):
        outcome = tmp_path / f"{rank}.json"
        failure = json.loads(outcome.read_text()) if outcome.exists() else "it did not end"
        assert not failure, f"rank {rank}: {failure}"
