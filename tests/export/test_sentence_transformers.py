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
    towers = write_run(tmp_path / "run", f"hf:{bert}", hf_pooling=pooling, loss="infonce")
    assert export_run(tmp_path / "run", to="sentence-transformers", output=tmp_path / "out") == []
    with reports() as logged:
        model = library.SentenceTransformer(str(tmp_path / "out"), device="cpu")
    assert not logged  # no pooler is missing
    _, expected = ours(towers)
    assert_equal(model.encode(TEXTS), expected)
    for text, one in zip(TEXTS, expected, strict=True):  # without any padding
        assert_equal(model.encode(text), one)
    assert model.similarity_fn_name == "cosine"
    assert model.prompts.get("query", "") == ""


def test_texts_are_cut_where_the_run_cut_them(bert: Path, tmp_path: Path) -> None:
    towers = write_run(tmp_path / "run", f"hf:{bert}", force_context_length=6)
    export_run(tmp_path / "run", to="sentence-transformers", output=tmp_path / "out")
    model = library.SentenceTransformer(str(tmp_path / "out"), device="cpu")
    assert model.max_seq_length == 6
    found = model.tokenizer(TEXTS[3:], truncation=True, return_tensors="pt")["input_ids"]
    assert torch.equal(found, towers.tokenizer(TEXTS[3:]))
    assert_equal(model.encode(TEXTS), ours(towers)[1])


def test_two_encoders_become_a_router(bert: Path, tmp_path: Path) -> None:
    towers = write_run(tmp_path / "run", f"hf:{bert}", hf_share=False, hf_pooling="cls")
    notes = export_run(tmp_path / "run", to="sentence-transformers", output=tmp_path / "out")
    assert [note for note in notes if "encode_query" in note]
    with reports() as logged:
        model = library.SentenceTransformer(str(tmp_path / "out"), device="cpu")
    assert not logged
    queries, documents = ours(towers)
    assert not torch.allclose(queries, documents, atol=1e-3)
    assert_equal(model.encode_query(TEXTS), queries)
    assert_equal(model.encode_document(TEXTS), documents)
    with pytest.raises(ValueError, match="query"):  # which of the two is not guessed
        model.encode(TEXTS)


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
