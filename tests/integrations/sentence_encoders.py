"""Small sentence encoders for tests, without a download, and the loss of given embeddings."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

library: Any = pytest.importorskip("sentence_transformers", minversion="5.4")
pytest.importorskip("transformers")
pytest.importorskip("accelerate")
modules: Any = importlib.import_module("sentence_transformers.sentence_transformer.modules")

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


def embeddings(rows: int, columns: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rows)
    return list(torch.randn(columns, rows, 6, generator=generator, dtype=torch.float64))
