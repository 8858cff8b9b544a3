"""Model cards: what they say of a run, and what the hub reads."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard

from megabatch.config.file import load_config
from megabatch.config.settings import TrainConfig
from megabatch.export import export_run
from tests.export.runs import write_run
from tests.models.tiny import TINY
from tests.models.tiny_bert import save_tiny_bert

SOURCES = "shards/{0..9}.tar::/home/me/a.csv::pipe:curl secret::https://key@host/b.tar?key=secret"


def card(run: Path, to: str, **settings: Any) -> ModelCard:
    output = run.with_name(f"{run.name}-{to}")
    export_run(run, to=to, output=output, **settings)
    return ModelCard.load(output / "README.md")


def log(run: Path, *steps: int) -> None:
    """The log of a run of 10 batches of 64 in an epoch."""
    rows = [{"step": step, "samples": 64 * step, "epoch": step / 10} for step in steps]
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def evaluation(run: Path, **about: Any) -> None:
    """An evaluation of the weights, which has two protocols."""
    both = {
        f"{way}/{name}": 0.125
        for way in ("image_to_text", "text_to_image")
        for name in ("recall@1", "recall@5", "recall@10", "median_rank", "queries")
    }
    entry = {"first": "image", "images": 3, "model": both, "chance": both}
    accuracy = dict.fromkeys(("top1", "top5", "mean_per_class_recall"), 0.5)
    classes = {
        "title": "digits",
        "classes": 9,
        "model": accuracy,
        "chance": accuracy,
        "protocol": "of classes",
    }
    content = {
        "run": {"weights": "model.safetensors", "step": None, **about},
        "retrieval": {
            "pairs": {"title": "/home/me/v.csv", "texts": 2, "protocol": "of pairs", **entry}
        },
        "zero_shot": {"classes": {**entry, **classes}},
    }
    (run / "evaluation.json").write_text(json.dumps(content))


def test_a_card_has_data_settings_figures_and_license(tmp_path: Path) -> None:
    run = tmp_path / "run"
    write_run(run, TINY, train_data=SOURCES, global_batch_size=64, trim_texts=False)
    log(run, 10, 15, 25)
    evaluation(run)
    found = card(run, "openclip", license="mit")
    data = found.data.to_dict()
    assert (data["library_name"], data["license"]) == ("open_clip", "mit")
    assert data["pipeline_tag"] == "zero-shot-image-classification"
    results = {(r.dataset_name, r.metric_type): r for r in found.data.eval_results or ()}
    assert len(results) == 4 + 4 + 3
    recall = results["v.csv, image → text: 0 among 2", "recall@5"]
    assert (recall.task_type, recall.metric_value) == ("image-text-retrieval", 0.125)
    for text in (
        "\nmodel, _, transform = open_clip.create_model_and_transforms('local-dir:run-openclip')\n",
        "Data: `{0..9}.tar::a.csv::pipe:...::b.tar`. 640 pairs in an epoch.",
        "seen until step 25: 1,600.\n",
        '\nloss = "clip"\n',
        "\n  model       12.50%      12.50%      12.50% ",
        "\nof pairs\nof classes\n",
        "License: mit.\n",
    ):
        assert text in found.text, text
    assert "secret" not in found.content
    assert "/home/me" not in found.content


def test_the_settings_of_a_card_are_those_of_the_run(tmp_path: Path) -> None:
    run = tmp_path / "run"
    settings: dict[str, Any] = {"matryoshka_dims": (8, 16), "trim_texts": False, "epochs": 3}
    write_run(run, TINY, train_data="a b.csv", output=tmp_path / "run", **settings)
    found = card(run, "openclip")
    (tmp_path / "card.toml").write_text(found.text.partition("```toml\n")[2].partition("```")[0])
    own = dataclasses.replace(load_config(run / "config.toml"), output=TrainConfig.output)
    assert load_config(tmp_path / "card.toml") == own


def test_figures_are_of_the_exported_weights(tmp_path: Path) -> None:
    run = tmp_path / "run"
    write_run(run, TINY)
    for about in ({"step": 3}, {"weights": "model-ema.safetensors"}):
        evaluation(run, **about)
        found = card(run, "openclip")
        assert "model-index" not in found.data.to_dict()
        assert "There are no figures of these weights." in found.text
        (tmp_path / "run-openclip").rename(tmp_path / about.popitem()[0])


def test_a_checkpoints_card_has_its_own_figures_and_samples(tmp_path: Path) -> None:
    run = tmp_path / "run"
    write_run(run, TINY, global_batch_size=64)
    log(run, 10, 20)
    checkpoint = run / "checkpoints/step-00000010"
    checkpoint.mkdir(parents=True)
    (run / "model.safetensors").rename(checkpoint / "model.safetensors")
    evaluation(checkpoint, step=10)
    found = card(run, "huggingface")
    assert found.data.eval_results
    assert "seen until step 10: 640." in found.text
    assert found.data.to_dict()["library_name"] == "transformers"


@pytest.mark.parametrize(
    ("settings", "to", "library", "pipeline", "tag"),
    [
        ({}, "sentence-transformers", "SentenceTransformer", "sentence-similarity", "dense"),
        (
            {"loss": "maxsim"},
            "sentence-transformers",
            "MultiVectorEncoder",
            "feature-ex",
            "multi-vector",
        ),
        ({}, "huggingface", "AutoModel", "feature-extraction", "megabatch"),
    ],
)
def test_retrievers(
    tmp_path: Path, settings: dict[str, Any], to: str, library: str, pipeline: str, tag: str
) -> None:
    write_run(tmp_path / "run", f"hf:{save_tiny_bert(tmp_path / 'bert')}", **settings)
    found = card(tmp_path / "run", to, repo="someone/model")
    assert (
        f"{library}('someone/model')" in found.text or f"{library}.from_pretrained(" in found.text
    )
    assert str(found.data.pipeline_tag).startswith(pipeline)
    assert tag in (found.data.tags or ())
    assert "`hf:bert`" in found.text
    assert str(tmp_path) not in found.content
