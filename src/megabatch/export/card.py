"""The model card of an exported folder: its README.md, as the Hugging Face hub reads it."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path, PurePath
from typing import Any

import torch
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from rich.console import Console

from megabatch import __version__
from megabatch.config.file import COMMAND, to_dict
from megabatch.config.settings import TrainConfig
from megabatch.evaluation.run_folder import Opened, read_metrics
from megabatch.evaluation.table import ACCURACY, entries_of, groups, print_evaluation
from megabatch.models.names import HUGGING_FACE, OPENCLIP

_LOADED_BY = {
    "openclip": "open_clip.create_model_and_transforms('{}')",
    "huggingface": "transformers.AutoModel.from_pretrained('{}')",
    "sentence-transformers": "sentence_transformers.SentenceTransformer('{}')",
}
_ZERO_SHOT = "zero-shot-image-classification"
_OF_FILES = ("model", "pretrained", "train_data", "val_data")
#: Settings that a card has whether or not they are the defaults, which may change.
_SHOWN = ("loss", "global_batch_size", "micro_batch_size", "opt", "lr", "wd", "precision")


def load_call(to: str, place: str, *, multi_vector: bool, on_hub: bool = False) -> str:
    """The call by which a library loads a folder, or a repository of the hub."""
    if to == "openclip":
        place = f"{'hf-hub' if on_hub else 'local-dir'}:{place}"
    call = _LOADED_BY[to].format(place)
    return call.replace("SentenceTransformer", "MultiVectorEncoder") if multi_vector else call


def write_card(
    folder: Path, opened: Opened, to: str, name: str, license: str, notes: Sequence[str]
) -> None:
    """Write README.md into a run's exported folder.

    Args:
        name: the model's; if it has the form NAME/REPO, it is loaded from there.
        license: the hub's name of one; notes: sentences for users of the model.
    """
    assert opened.folder is not None
    texts, multi_vector = opened.towers.first == "text", opened.towers.multi_vector
    tasks = "information-retrieval" if texts else "image-text-retrieval", _ZERO_SHOT
    pipeline = "feature-extraction" if texts else _ZERO_SHOT
    tags = ["multi-vector" if multi_vector else "dense" if texts else "clip", "megabatch"]
    if to == "sentence-transformers" and not multi_vector:
        pipeline = "sentence-similarity"
    evaluation = _evaluation(opened)
    default = {**to_dict(TrainConfig()), "output": opened.config.get("output")}
    console = Console(file=io.StringIO(), record=True, soft_wrap=True, markup=False, emoji=False)
    print_evaluation(evaluation, console)
    config = {k: _public(v) if k in _OF_FILES else v for k, v in opened.config.items()}
    changed = {k: v for k, v in config.items() if v != default.get(k) or k in _SHOWN}
    logged = read_metrics(opened.folder / "metrics.jsonl")
    shown: dict[str, Any] = {
        "log": [r for r in logged if opened.step is None or r["step"] <= opened.step],
        "settings": [f"{k} = {json.dumps(v, ensure_ascii=False)}" for k, v in changed.items()],
        "call": load_call(to, name, multi_vector=multi_vector, on_hub="/" in name),
        "figures": console.export_text(),
        "versions": f"megabatch {__version__}, torch {torch.__version__}",
        **{"name": name, "to": to, "notes": notes, "config": config},
    }
    data = ModelCardData(
        license=license,
        library_name={"openclip": "open_clip", "huggingface": "transformers"}.get(to, to),
        pipeline_tag=pipeline,
        tags=tags,
        model_name=name,
        eval_results=[
            EvalResult(tasks[g.columns is ACCURACY], g.heading, g.heading, key, value)
            for g in groups(evaluation)
            for key, value in zip(g.columns.values(), g.rows["model"], strict=True)
        ]
        or None,
    )
    card = ModelCard.from_template(data, str(Path(__file__).with_name("card.md")), **shown)
    card.save(folder / "README.md")


def _evaluation(opened: Opened) -> dict[str, Any]:
    """The evaluation of these very weights, with public names of its data, or one of no task."""
    assert opened.weights is not None
    path = opened.weights.with_name("evaluation.json")
    found: dict[str, Any] = json.loads(path.read_text("utf-8")) if path.is_file() else {"run": {}}
    run = found["run"]
    if (run.get("weights"), run.get("step")) != (opened.weights.name, opened.step):
        return {"retrieval": {}, "zero_shot": {}}
    for task in entries_of(found):
        task["title"] = _public(task["title"])
    return found


def _public(sources: str) -> str:
    """The last parts of sources: no folders of a machine, hosts, keys or commands."""
    shown = []
    for source in sources.split("::"):
        kind = next((k for k in (HUGGING_FACE, OPENCLIP) if source.startswith(k)), "")
        place = PurePath(source.removeprefix(kind).partition("?")[0]).name
        shown.append(f"{COMMAND}..." if source.startswith(COMMAND) else f"{kind}{place}")
    return "::".join(shown)
