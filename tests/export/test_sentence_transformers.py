"""Retrievers as sentence-transformers loads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megabatch.export import export_run
from megabatch.models import Towers
from tests.export.runs import change_json, reports, write_run
from tests.models.tiny_bert import save_tiny_bert

library: Any = pytest.importorskip("sentence_transformers", minversion="5.4")

# Of several lengths in a batch; the last is longer than the context.
TEXTS = ["a b c", "d", "e f unknown words", "a b c d e f g h a b c d e f"]


@pytest.fixture
def bert(tmp_path: Path) -> Path:
    return save_tiny_bert(tmp_path / "bert")


def ours(towers: Towers, texts: list[str] = TEXTS) -> tuple[Tensor, Tensor]:
    """Embeddings of first and second texts."""
    tokens = towers.tokenizer(texts)
    with torch.no_grad():
        outputs = towers.module(tokens, tokens)
    return outputs["image_features"], outputs["text_features"]


def assert_equal(found: Any, expected: Tensor) -> None:
    torch.testing.assert_close(torch.as_tensor(found), expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("pooling", ["mean", "cls", "last"])
def test_encode_gives_the_runs_embeddings(bert: Path, tmp_path: Path, pooling: str) -> None:
    settings: dict[str, Any] = {"hf_pooling": pooling, "force_context_length": 6}
    towers = write_run(tmp_path / "run", f"hf:{bert}", loss="infonce", **settings)
    assert export_run(tmp_path / "run", to="sentence-transformers", output=tmp_path / "out") == []
    with reports() as logged:
        model = library.SentenceTransformer(str(tmp_path / "out"), device="cpu")
    assert not logged  # no pooler is missing
    _, expected = ours(towers)
    assert_equal(model.encode(TEXTS), expected)
    for text, one in zip(TEXTS, expected, strict=True):  # without any padding
        assert_equal(model.encode(text), one)
    assert (model.similarity_fn_name, model.max_seq_length) == ("cosine", 6)


def test_two_encoders_become_two_models(bert: Path, tmp_path: Path) -> None:
    towers = write_run(tmp_path / "run", f"hf:{bert}", hf_share=False, hf_pooling="cls")
    [note] = export_run(tmp_path / "run", to="sentence-transformers", output=tmp_path / "out")
    assert note.startswith("there are two models, in its folders query and document")
    for side, expected in zip(("query", "document"), ours(towers), strict=True):
        model = library.SentenceTransformer(str(tmp_path / "out" / side), device="cpu")
        assert_equal(model.encode(TEXTS), expected)


def test_weights_are_float32_though_the_folder_had_less(bert: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    transformers.AutoModel.from_pretrained(bert).bfloat16().save_pretrained(bert)
    towers = write_run(tmp_path / "run", f"hf:{bert}")
    export_run(tmp_path / "run", to="sentence-transformers", output=tmp_path / "out")
    model = library.SentenceTransformer(str(tmp_path / "out"), device="cpu")
    assert_equal(model.encode(TEXTS), ours(towers)[1])


def test_padding_that_may_count_is_told(bert: Path, tmp_path: Path) -> None:
    write_run(tmp_path / "run", f"hf:{bert}")
    change_json(bert / "tokenizer_config.json", padding_side="left")
    [note] = export_run(tmp_path / "run", to="sentence-transformers", output=tmp_path / "out")
    assert "may depend on padding: the run padded texts to 12 tokens" in note
