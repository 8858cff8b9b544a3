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


def loss_of_tokens(loss: Any, columns: int, own: slice = slice(None)) -> list[Tensor]:
    """The loss of random tokens and its gradients; in one column of negatives a row has no token.

    Each column has two mini-batches of different lengths. own: which of them are in the batch.
    """
    generator = torch.Generator().manual_seed(columns)
    tokens, masks = [], []
    for length in (5, 7, 9, 4)[:columns]:
        sizes = (3, length, 7), (5, length - 1, 7)
        draws = [torch.rand(*size, generator=generator, dtype=torch.float64) for size in sizes]
        tokens.append([(draw[..., 1:] - 0.5).requires_grad_() for draw in draws[own]])
        masks.append([draw[..., 0] > 0.3 for draw in draws[own]])
    if columns > 2:
        masks[2][0][1] = False
    value = loss.calculate_loss(tokens, masks, with_backward=True)
    return [value, *(part.grad for column in tokens for part in column)]


def embeddings(rows: int, columns: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rows)
    return list(torch.randn(columns, rows, 6, generator=generator, dtype=torch.float64))
