"""The model card of an exported folder: its README.md, as the Hugging Face hub reads it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

import torch
from huggingface_hub import EvalResult, ModelCard, ModelCardData

from megabatch import __version__
from megabatch.config.file import COMMAND, FINE_TUNING, to_dict
from megabatch.config.settings import TrainConfig
from megabatch.errors import one_line
from megabatch.evaluation.run_folder import Opened, read_metrics
from megabatch.evaluation.table import ACCURACY, Group, cell, entries_of, groups
from megabatch.options import option

_LOADED_BY = {
    "openclip": "open_clip.create_model_and_transforms('{}')",
    "huggingface": "transformers.AutoModel.from_pretrained('{}')",
    "sentence-transformers": "sentence_transformers.SentenceTransformer('{}')",
}
_ZERO_SHOT = "zero-shot-image-classification"
#: Settings that a card has in a table.
_SHOWN = (
    *("loss", "global_batch_size", "micro_batch_size", "opt", "lr", "lr_scheduler", "wd"),
    *("precision", "seed"),
)
_OF_FILES = ("model", "pretrained", "train_data", "val_data")


def load_call(to: str, place: str, *, multi_vector: bool, on_hub: bool = False) -> str:
    """The call by which a library loads a folder, or a repository of the hub."""
    if to == "openclip":
        place = f"{'hf-hub' if on_hub else 'local-dir'}:{place}"
    call = _LOADED_BY[to].format(place)
    return call.replace("SentenceTransformer", "MultiVectorEncoder") if multi_vector else call


def write_card(
    folder: Path, opened: Opened, to: str, name: str, kind: str, license: str, notes: Sequence[str]
) -> list[str]:
    """Write README.md into an exported folder; returns a sentence if it lacks the run's figures.

    Args:
        folder, opened, to: the model's folder, its run, its library.
        name: the model's; if it has the form NAME/REPO, it is loaded from there.
        kind: of the model, in words; license: the hub's name of one; notes: for its users.
    """
    evaluation, tables, problem = _evaluation(opened)
    metadata = _metadata(to, opened)
    task = "information-retrieval" if opened.towers.first == "text" else "image-text-retrieval"
    results = [
        EvalResult(
            task_type=_ZERO_SHOT if table.columns is ACCURACY else task,
            dataset_type=table.heading,  # results of equal types would become one
            dataset_name=table.heading,
            metric_type=metric,
            metric_name=column,
            metric_value=round(value, 6),
        )
        for table in tables
        for (column, metric), value in zip(table.columns.items(), table.rows["model"], strict=True)
    ]
    config = {k: _public(v) if k in _OF_FILES else v for k, v in opened.config.items()}
    multi_vector, on_hub = opened.towers.multi_vector, "/" in name
    shown: dict[str, Any] = {
        **{"name": name, "kind": kind, "to": to, "notes": notes, "config": config, "cell": cell},
        "call": load_call(to, name, multi_vector=multi_vector, on_hub=on_hub),
        "parameters": sum(p.numel() for p in opened.towers.module.parameters()),
        **_seen(opened),
        "settings": {option(key): config[key] for key in _SHOWN if key in config},
        "command": " \\\n    ".join(_options(config)),
        "tables": tables,
        "protocols": dict.fromkeys(task.get("protocol", "?") for task in entries_of(evaluation)),
        "versions": f"megabatch {__version__}, torch {torch.__version__}",
    }
    data = ModelCardData(license=license, model_name=name, eval_results=results or None, **metadata)
    card = ModelCard.from_template(data, str(Path(__file__).with_name("card.md")), **shown)
    card.save(folder / "README.md")
    return problem


def _metadata(to: str, opened: Opened) -> dict[str, Any]:
    """The hub's name of the library, with the pipeline and tags that its own cards have."""
    if to == "sentence-transformers":
        tags = ["sentence-similarity", "feature-extraction", "dense"]
        if opened.towers.multi_vector:
            tags = ["feature-extraction", "multi-vector", "colbert", "late-interaction"]
        library, pipeline = to, tags[0]
        tags = [to, *tags]
    else:
        library, tags = ("open_clip", ["clip"]) if to == "openclip" else ("transformers", [])
        pipeline = "feature-extraction" if opened.towers.first == "text" else _ZERO_SHOT
    return {"library_name": library, "pipeline_tag": pipeline, "tags": [*tags, "megabatch"]}


def _evaluation(opened: Opened) -> tuple[dict[str, Any], list[Group], list[str]]:
    """The evaluation of these very weights with its figures, and a sentence if there is another."""
    assert opened.weights is not None
    assert opened.folder is not None
    problem = ""
    for folder in dict.fromkeys((opened.weights.parent, opened.folder)):
        if not (path := folder / "evaluation.json").is_file():
            continue
        try:
            evaluation: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            weights, step = evaluation["run"]["weights"], evaluation["run"]["step"]
            if (weights, step) == (opened.weights.name, opened.step):
                for task in entries_of(evaluation):
                    task["title"] = _public(task["title"])
                return evaluation, groups(evaluation), []
            problem = f"{path} is of other weights ({weights}, step {step})"
        except (ValueError, LookupError, TypeError) as error:
            problem = f"{path} is not as this version writes it ({one_line(error, 200)})"
    return {}, [], [f"the model card has no figures: {problem}"] if problem else []


def _seen(opened: Opened) -> dict[str, int | None]:
    """Training steps, samples seen, and pairs in an epoch, as far as the run's log tells them."""
    assert opened.folder is not None
    logged = read_metrics(opened.folder / "metrics.jsonl")
    past = [r for r in logged if opened.step is None or r["step"] <= opened.step]
    last = past[-1] if past else {}
    step = opened.step or last.get("step")
    batch = opened.config.get("global_batch_size", 0)
    epoch = round(last["samples"] / last["epoch"]) if last.get("epoch") else None
    return {"steps": step, "samples": step and step * batch, "pairs": epoch}


def _options(config: Mapping[str, Any]) -> Iterator[str]:
    """The words of the command that trained: settings whose value is no default."""
    yield "megabatch train"
    default = to_dict(TrainConfig())
    for key, value in config.items():
        if key == "output" or (value == default.get(key) and key not in FINE_TUNING):
            continue
        if isinstance(value, bool):
            yield option(key if value else f"no_{key}")
        else:
            values = value if isinstance(value, list) else [value]
            yield f"{option(key)} {shlex.join(map(str, values))}"


def _public(sources: str) -> str:
    """Sources without what is nobody's business: folders of a machine, hosts, keys, commands."""
    shown = []
    for source in sources.split("::"):
        kind, colon, place = (
            source.partition(":") if source.startswith(("hf:", "local-dir:")) else ("", "", source)
        )
        if place.startswith(COMMAND):
            place = f"{COMMAND}..."
        elif "://" in place:
            place = PurePath(place.partition("?")[0]).name
        elif place.startswith(("/", "~")):
            place = PurePath(place).name
        shown.append(f"{kind}{colon}{place}")
    return "::".join(shown)
