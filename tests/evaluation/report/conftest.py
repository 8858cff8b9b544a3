"""Features of a small task, and the folder of an evaluated run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from megabatch.data.glyphs import GlyphSet
from megabatch.evaluation.answers import Answers
from megabatch.evaluation.report import similarities
from megabatch.evaluation.report.content import Confused, Confusion
from megabatch.evaluation.report.write import Shown, write_report
from megabatch.evaluation.tasks import Matched, Task, glyph_tasks

HOSTILE = "<script>alert(1)</script>\"'&$\\frac$"


@pytest.fixture
def task(small_glyphs: GlyphSet) -> Task:
    return glyph_tasks(small_glyphs)[0]


@pytest.fixture
def matched(task: Task) -> Matched:
    return matched_of(task)


def matched_of(task: Task) -> Matched:
    """Features that find the right name for most images and a wrong one for the others."""
    captions = [task.samples[i].target[0] for i in range(len(task.samples))]
    texts = sorted(set(captions))
    ids = torch.tensor([texts.index(c) for c in captions])
    torch.manual_seed(0)
    text_features = F.normalize(torch.randn(len(texts), 16), dim=1)
    features = F.normalize(text_features[ids] + 0.35 * torch.randn(len(captions), 16), dim=1)
    indices = list(range(len(captions)))
    answers = Answers.by_ids(ids, torch.arange(len(texts)))
    return Matched(task.samples, indices, features, texts, text_features, answers)


def image_ids(matched: Matched) -> torch.Tensor:
    """The right text of each image, int64 (n,)."""
    assert set(matched.answers.there.counts.tolist()) == {1}
    return matched.answers.there.pairs()[1]


def accuracy(top1: float) -> dict[str, float]:
    return {"top1": top1, "top5": 0.9, "mean_per_class_recall": top1}


def retrieval(recall: float, rank: float) -> dict[str, float]:
    return {
        f"{way}/{key}": value
        for way in ("image_to_text", "text_to_image")
        for key, value in {
            **{f"recall@{k}": recall for k in (1, 5, 10)},
            "median_rank": rank,
            "queries": 8,
        }.items()
    }


def write_evaluation(
    folder: Path, *, recall: float = 0.5, title: str = HOSTILE, step: int | None = None
) -> None:
    figures = {"title": title, "note": title, "images": 8, "damage": [title]}
    evaluation = {
        "run": {"model": title, "parameters": 10, "weights": title, "train_data": title}
        | ({} if step is None else {"step": step}),
        "retrieval": {
            "pairs": {
                **figures,
                "texts": 8,
                "model": retrieval(recall, 4 - recall),
                "chance": retrieval(0.1, 4),
            }
        },
        "zero_shot": {
            "classes": {
                **figures,
                "classes": 2,
                "prompts": {"templates": [title], "source": title},
                "model": accuracy(recall),
                "chance": accuracy(0.5),
                "recall_by_class": {title: recall},
            }
        },
        "date": "2026-01-02T03:04:05+00:00",
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "evaluation.json").write_text(json.dumps(evaluation))


def write_run(
    folder: Path, *, settings: str = 'model = "m"\nglobal_batch_size = 64\n', **logged: float
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.toml").write_text(settings)
    records = [
        {"step": step, "samples": 64 * step} | {key: v / step for key, v in logged.items()}
        for step in (1, 2, 3)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    return folder


@pytest.fixture
def evaluated(tmp_path: Path, evaluated_once: Path) -> Path:
    """A run all of whose names, captions, settings and notes look like HTML."""
    return shutil.copytree(evaluated_once, tmp_path / evaluated_once.name)


@pytest.fixture(scope="session")
def evaluated_once(tmp_path_factory: pytest.TempPathFactory, small_glyphs: GlyphSet) -> Path:
    matched = matched_of(glyph_tasks(small_glyphs)[0])
    setting = json.dumps(HOSTILE)
    run = write_run(
        tmp_path_factory.mktemp("evaluated") / "<script>alert(1)",
        settings=f"model = {setting}\ntrain_data = {setting}\n"
        "global_batch_size = 4096\nmicro_batch_size = 512\n",
        **{"loss": 6, "lr": 1e-3, "grad_norm": 2, "logit_scale": 14, "pairs_per_second": 9},
    )
    write_evaluation(run)
    n = len(matched.indices) // 2
    hostile = Matched(
        matched.samples,
        matched.indices[:n],
        matched.features[:n],
        [f"{text} {HOSTILE}" for text in matched.texts],
        matched.text_features,
        Answers.by_ids(image_ids(matched)[:n], torch.arange(len(matched.texts))),
    )
    confusion = Confusion(
        HOSTILE, [Confused(HOSTILE, HOSTILE, 1, 2)], [HOSTILE, "b"], [[1, 1], [0, 2]]
    )
    shown = [Shown(HOSTILE, hostile), Shown("classes", hostile, of_classes=True)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(similarities, "_MAPPED", 10)
        write_report(run, run, shown, {HOSTILE: [confusion]})
    return run
