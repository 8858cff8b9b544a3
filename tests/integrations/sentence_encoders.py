"""Small sentence encoders for tests, without a download, and the loss of given embeddings."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

library: Any = pytest.importorskip("sentence_transformers", minversion="5.4")
pytest.importorskip("transformers")
pytest.importorskip("accelerate")
modules: Any = importlib.import_module("sentence_transformers.sentence_transformer.modules")

multi_vector = pytest.mark.skipif(library.__version__ < "6", reason="before multi-vector encoders")
#: In the library this method rounds scores of late interaction to float32.
scores_in_float64 = mock.patch.object(Tensor, "float", Tensor.double)

OTHER_DIRECTIONS = ["query_to_query", "doc_to_query", "doc_to_doc"]
SYMMETRIC = ("query_to_doc", "doc_to_query")
EVERY_DIRECTION = ("query_to_doc", *OTHER_DIRECTIONS)
WIDTH = 16


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


def colbert(folder: Path) -> Any:
    """A multi-vector encoder with dropout. Short queries are expanded, "h" in documents skipped."""
    torch.manual_seed(0)
    expansion = {"strategy": "min", "length": 6, "token": "[UNK]"}
    words = modules.Transformer(str(folder / "bert"), query_expansion=expansion)
    mask = library.multi_vector_encoder.modules.MultiVectorMask(["h"])
    unit = modules.Normalize("token_embeddings", "token_embeddings")
    return library.MultiVectorEncoder(modules=[words, mask, unit], device="cpu")


def without_dropout(model: Any) -> Any:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("attention_probs_dropout_prob", "dropout_prob"):  # the latter before 5
            if hasattr(module, name):
                setattr(module, name, 0.0)
    return model


def loss_and_gradients(loss: Any, columns: list[Tensor]) -> list[Tensor]:
    embeddings = [column.clone().requires_grad_() for column in columns]
    value = loss.compute_loss_from_embeddings(embeddings, None)
    return [value.detach(), *torch.autograd.grad(value, embeddings)]


def own_multi_vector_loss(*args: Any, **kwargs: Any) -> Any:
    losses = library.multi_vector_encoder.losses
    return losses.CachedMultiVectorMultipleNegativesRankingLoss(*args, **kwargs)


def different_lengths(model: Any, **first: Any) -> list[dict[str, Any]]:
    """Three columns of seven texts of one to nine words, in no order."""
    counts = [[1, 9, 2, 8, 3, 1, 5], [4, 1, 7, 2, 2, 6, 9], [1, 1, 2, 3, 1, 8, 1]]
    letters = 3 * "abcdefgh"
    texts = [[" ".join(letters[i : i + n]) for i, n in enumerate(column)] for column in counts]
    return [model.preprocess(texts[0], **first), *map(model.preprocess, texts[1:])]


def step(loss: Any, model: Any, columns: list[dict[str, Any]]) -> list[Tensor]:
    """The loss, gradients of all weights, and the loss without gradients."""
    model.zero_grad()
    value = loss([dict(column) for column in columns], None)
    value.backward()
    gradients = [torch.zeros(()) if p.grad is None else p.grad for p in model.parameters()]
    with torch.no_grad():
        evaluated = loss([dict(column) for column in columns], None)
    return [value.detach(), evaluated, *(gradient.clone() for gradient in gradients)]


def embeddings(rows: int, columns: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rows)
    return list(torch.randn(columns, rows, 6, generator=generator, dtype=torch.float64))
