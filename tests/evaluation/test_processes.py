"""Whole evaluations on two processes against one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import save_file

from megabatch import retrieval_metrics
from megabatch.errors import UsageError
from megabatch.evaluation import retrieval
from megabatch.evaluation.config import EvalConfig
from megabatch.evaluation.retrieval import answers_by_pairs, figures_and_chance
from megabatch.evaluation.run import evaluate
from megabatch.evaluation.tokens import Tokens
from megabatch.models import create
from tests.evaluation.material import caption_table, image_folder, untrained_run
from tests.similarity.distributed.processes import World, on_processes


@on_processes(2)
def test_retrieval_over_processes_equals_one_process(world: World) -> None:
    x, y = torch.randn(1300, 8), torch.randn(700, 8)
    x_ids, y_ids = torch.arange(1300) % 650, torch.arange(700) % 660
    right = answers_by_pairs(torch.arange(900) % 650, torch.arange(900) % 660, 1300, 700)
    parts = [world.shard(t, [900, 400]) for t in (x, x_ids)]
    others = [world.shard(t, [0, 700]) for t in (y, y_ids)]
    with mock.patch.object(retrieval, "_CPU_SCORES", 64 * 700):  # so that both have queries
        expected = retrieval_metrics(x, y, x_ids=x_ids, y_ids=y_ids, group="local")
        found = retrieval_metrics(parts[0], others[0], x_ids=parts[1], y_ids=others[1])
        assert found == expected
        lengths = torch.arange(1300) % 4, torch.arange(700) % 3
        tokens = [Tokens(torch.randn(int(n.sum()), 8), n) for n in lengths]
        for features in ((x, y), tokens):
            alone, both = (
                figures_and_chance(*features, right, ks=(1,), group=g) for g in ("local", None)
            )
            assert alone == both
    pairs = retrieval_metrics(world.shard(x[:700], [300, 400]), world.shard(y, [300, 400]))
    assert pairs == retrieval_metrics(x[:700], y, group="local")
    with pytest.raises(ValueError, match="expected the same call on all ranks"):
        retrieval_metrics(x[:, : 4 + world.rank], y[:, : 4 + world.rank])


@on_processes(2)
def test_an_evaluation_on_two_processes_equals_one(world: World) -> None:
    folder = untrained_run(world.folder / f"evaluation-{world.rank}", "shards/")
    (folder / "templates.txt").write_text("{}\na {}\n")
    caption_table(folder / "pairs", 150)
    os.truncate(folder / "pairs" / "5.png", 10)
    image_folder(folder / "test", 20)
    settings: dict[str, Any] = {
        "run": Path("."),
        "val_data": "pairs/pairs.csv",
        "class_data": "test",
        "templates": "templates.txt",
        "device": "cpu",
        "batch_size": 32,
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        alone = evaluate(EvalConfig(**settings, output=folder / "alone"), group="local")
        both = evaluate(EvalConfig(**settings, output=folder / "both"))
    pairs = alone["retrieval"]["pairs"]
    assert pairs["skipped"] == {"undecodable image": 1}
    assert pairs["texts"] > pairs["images"] == 149
    for part in ("retrieval", "zero_shot"):
        assert alone[part] == both[part]
    assert (folder / "alone" / "evaluation.json").exists()
    for name in ("evaluation.json", "report.html"):
        assert (folder / "both" / name).exists() == (world.rank == 0)


@on_processes(2)
def test_other_files_or_settings_on_one_process_are_refused(world: World) -> None:
    tables = [caption_table(world.folder / f"{world.rank}-{n}" / "pairs", n) for n in (3, 4)]
    settings: dict[str, Any] = {"output": world.folder / "out", "val_data": "pairs/pairs.csv"}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tables[world.rank].parents[1])
        with pytest.raises(
            UsageError, match=r"^number of samples of pairs: 3, 4 by rank; expected"
        ):
            evaluate(EvalConfig(model="glyph-small", **settings))
        patch.chdir(tables[0].parents[1])
        with pytest.raises(UsageError, match=r"^--batch-size: 7, 8 by rank; expected the same"):
            evaluate(EvalConfig(model="glyph-small", batch_size=7 + world.rank, **settings))
        state = create("glyph-small").module.state_dict()
        state["logit_scale"] += world.rank
        save_file(state, "some.safetensors")
        pretrained = Path("some.safetensors")
        with pytest.raises(UsageError, match=r"^checksum of the weights: \d+, \d+ by rank; "):
            evaluate(EvalConfig(model="glyph-small", pretrained=pretrained, **settings))
