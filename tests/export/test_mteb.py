"""Exported retrievers under MTEB: the recipe of docs/evaluation.md, on pairs of our own."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest

from megabatch.evaluation import evaluate_run
from megabatch.export import export_run
from tests.export.runs import write_run
from tests.models.tiny_bert import save_tiny_bert

mteb: Any = pytest.importorskip("mteb", minversion="2", reason="mteb 2 is not installed")
sentence_transformers: Any = pytest.importorskip("sentence_transformers", minversion="5.4")

QUERIES = [f"{a} {b} {c}" for a in "abcd" for b in "efgh" for c in "ab"]
DOCUMENTS = [f"{c} {b} {a} unknown" for a in "abcd" for b in "efgh" for c in "ab"]


def task() -> Any:
    """Each query has the document of its own number."""
    from datasets import Dataset
    from mteb.abstasks import AbsTaskRetrieval
    from mteb.abstasks.task_metadata import TaskMetadata

    texts = {"queries": ("q", QUERIES), "corpus": ("d", DOCUMENTS)}

    class Own(AbsTaskRetrieval):  # type: ignore[misc]
        metadata = TaskMetadata(
            **{"name": "Own", "description": "Our own pairs", "type": "Retrieval"},
            **{"category": "t2t", "modalities": ["text"], "main_score": "recall_at_1"},
            dataset={"path": "none", "revision": "1"},
            **{"eval_splits": ["test"], "eval_langs": ["eng-Latn"]},
        )

        def load_data(self, **_: Any) -> None:
            columns = {
                name: {"id": [f"{key}{i}" for i in range(len(of))], "text": of}
                for name, (key, of) in texts.items()
            }
            columns["corpus"]["title"] = [""] * len(DOCUMENTS)
            data: dict[str, Any] = {k: Dataset.from_dict(v) for k, v in columns.items()}
            data["relevant_docs"] = {f"q{i}": {f"d{i}": 1} for i in range(len(QUERIES))}
            self.dataset = {"default": {"test": {**data, "top_ranked": None}}}
            self.data_loaded = True

    return Own()


@pytest.mark.parametrize("settings", [{}, {"loss": "maxsim"}])
def test_mteb_finds_the_recall_of_megabatch_eval_with_the_runs_prefixes(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    with (tmp_path / "pairs.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("query", "text"), *zip(QUERIES, DOCUMENTS, strict=True)])
    run, bert = tmp_path / "run", save_tiny_bert(tmp_path / "bert")
    write_run(run, f"hf:{bert}", query_prefix="a h ", caption_prefix="b ", **settings)
    ours = evaluate_run(run, val_data=str(tmp_path / "pairs.csv"))
    export_run(run, to="sentence-transformers", output=tmp_path / "out")
    library = "MultiVectorEncoder" if settings else "SentenceTransformer"
    model = getattr(sentence_transformers, library)(str(tmp_path / "out"), device="cpu")
    results = mteb.evaluate(model, [task()], cache=None)
    [scores] = results.task_results[0].scores["test"]
    for k in (1, 5, 10):
        recall = ours["retrieval"]["pairs"]["model"][f"image_to_text/recall@{k}"]
        assert scores[f"recall_at_{k}"] == pytest.approx(recall, abs=1e-5)
    assert 0 < recall < 1
