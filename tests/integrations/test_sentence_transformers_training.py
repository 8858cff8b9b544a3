"""Training with the ranking losses gives the weights of sentence-transformers' own."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.integrations.sentence_encoders import (
    EVERY_DIRECTION,
    SYMMETRIC,
    WIDTH,
    bert,
    colbert,
    different_lengths,
    embeddings,
    library,
    loss_and_gradients,
    multi_vector,
    own_multi_vector_loss,
    scores_in_float64,
    static,
    step,
    without_dropout,
)
from tests.integrations.training import weights_of
from tests.models.tiny_bert import save_tiny_bert
from tests.similarity.distributed.processes import World

datasets: Any = pytest.importorskip("datasets")
transformers: Any = pytest.importorskip("transformers")
losses: Any = importlib.import_module("sentence_transformers.sentence_transformer.losses")

from megabatch.integrations.sentence_transformers import (  # noqa: E402
    MegabatchGISTEmbedLoss,
    MegabatchMultiVectorRankingLoss,
    MegabatchRankingLoss,
    UncachedMegabatchRankingLoss,
)

SAMPLES = 16


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


CACHED = MegabatchRankingLoss, losses.CachedMultipleNegativesRankingLoss
UNCACHED = UncachedMegabatchRankingLoss, losses.MultipleNegativesRankingLoss
GUIDED = MegabatchGISTEmbedLoss, losses.CachedGISTEmbedLoss
MULTI_VECTOR = MegabatchMultiVectorRankingLoss, own_multi_vector_loss


def train_both(
    folder: Path,
    kinds: tuple[Any, Any],
    make_loss: Callable[[Any, Any], Any],
    data: Any,
    *,
    make_model: Callable[[Path], Any] = bert,
    tolerance: float = 1e-5,
    **arguments: Any,
) -> None:
    """Train with each loss; assert equal weights and evaluations, and that weights have moved.

    make_loss: takes the class and the model. tolerance: of weights, relative to the largest of a
    tensor, which may be much larger than 1.
    """
    # Without clipping, SGD's steps are proportional to the gradients and show a wrong factor.
    options: dict[str, Any] = {
        "output_dir": str(folder / "run"),
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "max_grad_norm": 1000.0,
        "num_train_epochs": 1,
        "optim": "sgd",
        "learning_rate": 0.02,
        "lr_scheduler_type": "constant",
        "use_cpu": True,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "logging_strategy": "no",
    }
    before = weights_of(make_model(folder))
    weights, evaluations = [], []
    for kind in kinds:
        model = make_model(folder)
        kind_of_model = type(model).__name__
        trainer = getattr(library, f"{kind_of_model}Trainer")(
            model,
            getattr(library, f"{kind_of_model}TrainingArguments")(**options | arguments),
            train_dataset=data,
            eval_dataset=data,
            loss=make_loss(kind, model),
        )
        trainer.train()
        weights.append(weights_of(model))
        evaluations.append({k: v for k, v in trainer.evaluate().items() if k.endswith("_loss")})
    found, expected = weights
    assert max((found[name] - before[name]).abs().max().item() for name in before) > 1e-3
    for name, value in found.items():
        atol = tolerance * max(1.0, expected[name].abs().max().item())
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=atol, msg=name)
    assert evaluations[0] == pytest.approx(evaluations[1], rel=10 * tolerance)


def every_direction(kind: Any, model: Any, **settings: Any) -> Any:
    settings |= {"hardness_mode": "in_batch_negatives", "hardness_strength": 5.0}
    return kind(model, mini_batch_size=3, directions=EVERY_DIRECTION, **settings)


def keeping(make: Callable[..., Any], kind: Any, model: Any) -> Any:
    """The loss that `make` creates; ours keeps the activations of a mini-batch of each column."""
    own = kind in (MegabatchRankingLoss, MegabatchMultiVectorRankingLoss)
    return make(kind, model, **({"kept_mini_batches": 1} if own else {}))


def sized(kind: Any, model: Any) -> Any:
    return kind(model, mini_batch_size=3)


def guided(guide: Any, kind: Any, model: Any) -> Any:
    return kind(model, guide, mini_batch_size=3, margin=0.05, gather_across_devices=True)


def test_trains_as_the_library_does(folder: Path) -> None:
    train_both(folder, CACHED, every_direction, texts(4))


@pytest.mark.skipif(library.__version__ < "6", reason="says no ranges before 6.0")
def test_trains_as_the_library_does_with_kept_mini_batches(folder: Path) -> None:
    train_both(folder, CACHED, functools.partial(keeping, every_direction), texts(4))


def test_trains_as_the_library_does_on_several_datasets(folder: Path) -> None:
    def each(kind: Any, model: Any) -> Any:
        symmetric = {"directions": SYMMETRIC, "partition_mode": "per_direction"}
        return {"a": kind(model, mini_batch_size=2, **symmetric), "b": kind(model, scale=50)}

    train_both(folder, CACHED, each, datasets.DatasetDict({"a": texts(2), "b": texts(3)}))


def test_trains_as_the_library_does_in_bfloat16_with_checkpointing(folder: Path) -> None:
    def checkpointed(folder: Path) -> Any:
        model = bert(folder)
        model[0].auto_model.gradient_checkpointing_enable()
        return model

    # Older trainers compute the loss under autocast, where the library rounds scores to bfloat16.
    tolerance = 1e-5 if int(transformers.__version__.partition(".")[0]) >= 5 else 0.03
    options: dict[str, Any] = {"make_model": checkpointed, "bf16": True, "tolerance": tolerance}
    train_both(folder, CACHED, sized, texts(2), **options)


def test_trains_as_the_library_does_with_a_guide(folder: Path) -> None:
    def matryoshka(kind: Any, model: Any) -> Any:
        return losses.MatryoshkaLoss(model, guided(bert(folder), kind, model), [WIDTH, 6])

    train_both(folder, GUIDED, matryoshka, texts(3))


def test_trains_as_the_library_does_without_caching(folder: Path) -> None:
    def matryoshka(kind: Any, model: Any) -> Any:
        return losses.MatryoshkaLoss(model, kind(model), [WIDTH, 6])

    train_both(folder, UNCACHED, matryoshka, texts(3), make_model=static)


def train_multi_vector_encoders(folder: Path, **settings: Any) -> None:
    """50 steps with prompts, expanded queries, skipped tokens and a column of negatives."""

    def make(kind: Any, model: Any, **more: Any) -> Any:
        return kind(model, scale=4.0, mini_batch_size=4, **settings, **more)

    options: dict[str, Any] = {"max_steps": 50, "gradient_accumulation_steps": 1}
    options["prompts"] = {"anchor": "a ", "positive": "b ", "negative_1": "b "}
    make_loss = functools.partial(keeping, make)
    train_both(folder, MULTI_VECTOR, make_loss, texts(3), make_model=colbert, **options)


@multi_vector
def test_multi_vector_encoders_train_as_the_librarys(folder: Path) -> None:
    train_multi_vector_encoders(folder)


def test_sorted_texts_train_as_the_librarys_with_matryoshka_loss(folder: Path) -> None:
    words = ["a b c d e f g", "b", "c d", "a c e g b d f h", "f", "e f g", "g h", "h"]
    columns = {"anchor": words * 2, "positive": words[3:] + words + ["a"] * 3}
    data = datasets.Dataset.from_dict(columns)

    def matryoshka(kind: Any, model: Any) -> Any:
        return losses.MatryoshkaLoss(model, sized(kind, model), [WIDTH, 6], [1, 0.5])

    make_model = lambda folder: without_dropout(bert(folder))  # noqa: E731
    train_both(folder, CACHED, matryoshka, data, make_model=make_model)


# --- two ranks ------------------------------------------------------------------------------------


def on_two_trains_as_the_librarys_do(world: World) -> None:
    """Both losses on the ranks of one DistributedDataParallel model, gathering and not."""
    if world.rank == 0:  # transformers writes nothing on other ranks
        save_tiny_bert(world.folder / "bert")
    dist.barrier()
    for gather in (True, False):
        make = functools.partial(every_direction, gather_across_devices=gather)
        train_both(world.folder, CACHED, make, texts(3))
        if library.__version__ >= "6":
            train_both(world.folder, CACHED, functools.partial(keeping, make), texts(3))
    # Before 6 the library compared the guide with the first rank's positives alone.
    if library.__version__ >= "6":
        guide = bert(world.folder)
        train_both(world.folder, GUIDED, functools.partial(guided, guide), texts(3))
        train_multi_vector_encoders(world.folder, gather_across_devices=True)


def on_two_shards_of_different_sizes(world: World) -> None:
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
    own = slice(0, 3) if world.rank == 0 else slice(3, 8)
    loss = UncachedMegabatchRankingLoss(nn.Module(), gather_across_devices=True, **settings)
    found, *own_gradients = loss_and_gradients(loss, [column[own] for column in batch])
    dist.all_reduce(found)
    torch.testing.assert_close(found / 2, expected)
    for column, gradient in zip(own_gradients, gradients, strict=True):
        torch.testing.assert_close(column / 2, gradient[own])


@scores_in_float64
def on_two_shards_of_documents_of_different_lengths(world: World) -> None:
    if library.__version__ >= "6":
        model = without_dropout(colbert(world.folder).double())
        queries, negatives, positives = different_lengths(model, task="query")
        batch = queries, positives, negatives  # the longest of each rank
        own = slice(0, 3) if world.rank == 0 else slice(3, 7)
        shards = [{k: v[own] for k, v in c.items() if isinstance(v, Tensor)} for c in batch]
        loss = MegabatchMultiVectorRankingLoss(model, gather_across_devices=True)
        results = step(loss, model, shards), step(own_multi_vector_loss(model), model, batch)
        for found, expected in zip(*results, strict=True):
            dist.all_reduce(found)
            torch.testing.assert_close(found / 2, expected, rtol=1e-10, atol=1e-12)
