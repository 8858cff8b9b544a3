"""Models as transformers loads them, and retrievers as sentence-transformers does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megabatch.errors import UsageError
from megabatch.export import export_run
from megabatch.models import ModelOptions, Towers, create
from megabatch.models.hf_images import KINDS
from megabatch.models.padding import counted, pool
from tests.export.runs import (
    assert_near,
    change_json,
    pictures,
    reports,
    transformers_model,
    write_run,
)
from tests.models.tiny_bert import save_tiny_bert
from tests.models.tiny_clip import save_tiny_clip

transformers: Any = pytest.importorskip("transformers")

# The texts have several lengths; the last is longer than the context.
TEXTS = ["a b c", "d", "e f unknown words", "a b c d e f g h a b c d e f"]


@pytest.mark.parametrize("kind", KINDS)
def test_transformers_gives_the_runs_embeddings(tmp_path: Path, kind: str) -> None:
    clip = save_tiny_clip(tmp_path / "clip", kind)
    towers = write_run(tmp_path / "run", f"hf:{clip}", force_context_length=8)
    assert export_run(tmp_path / "run", to="huggingface", output=tmp_path / "out") == []
    model = transformers_model(tmp_path / "out")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    inputs = tokenizer(TEXTS, padding="max_length", truncation=True, return_tensors="pt")
    tokens = towers.tokenizer(TEXTS)
    assert torch.equal(inputs["input_ids"], tokens)
    processor = transformers.AutoImageProcessor.from_pretrained(tmp_path / "out")
    pixels = processor(pictures(), return_tensors="pt")["pixel_values"]
    assert pixels.shape == (2, 3, 32, 32)
    with torch.no_grad():
        found = model(input_ids=tokens, pixel_values=pixels)
        expected = towers.module(pixels, tokens)
    assert_near(found.text_embeds, expected["text_features"])
    assert_near(found.image_embeds, expected["image_features"])
    assert torch.equal(model.logit_scale, towers.module.logit_scale)
    again = create(f"hf:{tmp_path / 'out'}")  # and megabatch trains on from it
    torch.testing.assert_close(again.module.state_dict(), towers.module.state_dict())


# --- text encoders --------------------------------------------------------------------------------


@pytest.fixture
def bert(tmp_path: Path) -> Path:
    return save_tiny_bert(tmp_path / "bert")


def ours(towers: Towers) -> tuple[Tensor, Tensor]:
    """Embeddings of first and second texts."""
    first = torch.stack([towers.eval_transform(text) for text in TEXTS])
    with torch.no_grad():
        outputs = towers.module(first, towers.tokenizer(TEXTS))
    return outputs["image_features"], outputs["text_features"]


def sentence_model(folder: Path) -> Any:
    library = pytest.importorskip("sentence_transformers", minversion="5.4")
    return library.SentenceTransformer(str(folder), device="cpu")


@pytest.mark.parametrize(
    ("pooling", "told"),
    [("mean", "the mean over the tokens"), ("cls", "the first token"), ("last", "the last token")],
)
def test_both_libraries_give_the_runs_embeddings(
    bert: Path, tmp_path: Path, pooling: Any, told: str
) -> None:
    settings: dict[str, Any] = {"hf_pooling": pooling, "force_context_length": 6}
    settings |= {"query_prefix": "a b\\n::c ", "caption_prefix": "d "}
    # The run's weights are float32, though the folder has less.
    transformers.AutoModel.from_pretrained(bert).bfloat16().save_pretrained(bert)
    towers = write_run(tmp_path / "run", f"hf:{bert}", loss="infonce", **settings)
    _, expected = ours(towers)
    assert export_run(tmp_path / "run", to="sentence-transformers", output=tmp_path / "out") == []
    [note] = export_run(tmp_path / "run", to="huggingface", output=tmp_path / "encoder")
    assert f"an embedding is {told}" in note
    assert "; add_pooling_layer=False loads it without a pooler" in note
    with reports() as logged:
        model = sentence_model(tmp_path / "out")
        encoder = transformers.AutoModel.from_pretrained(
            tmp_path / "encoder", add_pooling_layer=False
        )
        create(f"hf:{tmp_path / 'encoder'}")
    assert not logged  # no pooler is missing
    assert_near(torch.tensor(model.encode(TEXTS)), expected)
    for text, one in zip(TEXTS, expected, strict=True):  # without any padding
        assert_near(torch.tensor(model.encode(text)), one)
    assert_near(model.encode_query("c"), model.encode("a b c"))
    assert_near(model.encode_document("c"), model.encode("d c"))
    assert (model.similarity_fn_name, model.max_seq_length) == ("cosine", 6)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "encoder")
    inputs = tokenizer(TEXTS, padding=True, truncation=True, return_tensors="pt")
    with torch.no_grad():
        states = encoder(**inputs).last_hidden_state
    assert_near(F.normalize(pool(states, inputs["attention_mask"], pooling)), expected)


def test_two_encoders_become_two_models_and_padding_that_may_count_is_told(
    bert: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    towers = write_run(run, f"hf:{bert}", hf_share=False, hf_pooling="cls")
    [note] = export_run(run, to="sentence-transformers", output=tmp_path / "out")
    assert note.startswith("there are two models, in its folders query and document")
    for side, expected in zip(("query", "document"), ours(towers), strict=True):
        model = sentence_model(tmp_path / "out" / side)
        assert_near(torch.tensor(model.encode(TEXTS)), expected)
    change_json(bert / "tokenizer_config.json", padding_side="left")
    told, _ = export_run(run, to="sentence-transformers", output=tmp_path / "left")
    assert "may depend on padding: the run padded texts to 12 tokens" in told


# --- a vector for each token ----------------------------------------------------------------------


def encoded(query: Path, document: Path) -> list[list[Tensor]]:
    """Vectors of the tokens of queries and of documents, by sentence-transformers."""
    library = pytest.importorskip("sentence_transformers", minversion="6.2")
    models = [library.MultiVectorEncoder(str(f), device="cpu") for f in (query, document)]
    return [models[0].encode_query(TEXTS), models[1].encode_document(TEXTS)]


def test_a_multi_vector_encoder_gives_the_runs_vectors(bert: Path, tmp_path: Path) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    settings: dict[str, Any] = {"maxsim_dim": 4, "force_context_length": 7, "loss": "maxsim"}
    towers = write_run(run, f"hf:{bert}", **settings)
    assert export_run(run, to="sentence-transformers", output=out) == []
    vectors = [[text[counted(text)] for text in side] for side in ours(towers)]
    assert [vector.shape for vector in vectors[0]] == [(5, 4), (3, 4), (6, 4), (7, 4)]
    assert_near(encoded(out, out), vectors)
    two = write_run(tmp_path / "two", f"hf:{bert}", hf_share=False, **settings)
    export_run(tmp_path / "two", to="sentence-transformers", output=tmp_path / "sides")
    vectors = [[text[counted(text)] for text in side] for side in ours(two)]
    assert_near(encoded(tmp_path / "sides/query", tmp_path / "sides/document"), vectors)

    with pytest.raises(
        UsageError, match="MultiVectorMask, Normalize with no pooling, expected one p"
    ):
        create(f"hf:{out}")  # for a model with one vector
    options, message = ModelOptions(multi_vector=True), "expected a folder without a projection"
    with pytest.raises(UsageError, match=message):
        create(f"hf:{out}", options=options)
    (out / "config_sentence_transformers.json").unlink()
    change_json(out / "config.json", architectures=["HF_ColBERT"])
    with pytest.raises(UsageError, match=message):
        create(f"hf:{out}", options=options)
