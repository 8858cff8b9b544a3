"""benchmarks/same_accuracy.py on a few icons, in one process and in two."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

import same_accuracy
from megabatch.data.sources import open_pairs
from megabatch.training.world import World
from tests.benchmarks.study_files import write_icons
from tests.benchmarks.test_scripts import SCRIPTS, run
from tests.similarity.distributed.processes import on_processes


def words_of(icons: Path) -> list[str]:
    """Options of a small run, on icons that are written to this folder."""
    write_icons(icons, 64, 8)
    data = f"--train-data={icons / 'train'}", f"--val-data={icons / 'test'}"
    return ["--batch-size=32", "--micro-batches=2", "--steps=2", "--precision=fp32", *data]


def test_ways_agree_and_a_call_adds_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words, output = words_of(tmp_path / "icons"), tmp_path / "same.json"
    same_accuracy.main([*words, f"--output={output}", "--seeds=1"])
    shown = capsys.readouterr().out
    same_accuracy.main([*words, f"--output={output}", "--seeds=2"])
    content = json.loads(output.read_text())
    assert [(r["contender"], r["seed"]) for r in content["records"]] == [
        (contender, seed) for seed in (0, 1) for contender in ("dense", "tiled", "cached")
    ]
    sizes = {r["contender"]: r["micro_batch_size"] for r in content["records"]}
    assert sizes == {"dense": 32, "tiled": 32, "cached": 16}
    for one in content["comparison"]:
        assert (one["data"], one["n_devices"], one["seeds"]) == ("icons", 1, 2)
        assert one["largest_difference"] < 1e-4 < one["largest_difference_of_seeds"]
        assert one["last_loss"]["deviation"] > 0
        assert 0 <= one["figures"]["test/image_to_text/recall@10"]["mean"] <= 1
    assert shown.count("1 ranks, fp32, seed 0: loss") == 3
    run("plots.py", str(output))
    assert (tmp_path / "same-icons-fp32.png").exists()


def test_no_run_begins_after_the_budget(tmp_path: Path) -> None:
    words, output = words_of(tmp_path / "icons"), tmp_path / "same.json"
    same_accuracy.main([*words, f"--output={output}", "--budget-seconds=1e-9"])
    assert not output.exists()


def test_the_record_has_the_same_figures_in_all_cases() -> None:
    record = json.loads((SCRIPTS / "results/same-accuracy.json").read_text())
    cases = {(one["contender"], one["n_devices"]): one for one in record["comparison"]}
    assert len(cases) == 9
    for seed in range(5):
        runs = [run["tests"] for run in record["records"] if run["seed"] == seed]
        assert len(runs) == 9
        assert all(run == runs[0] for run in runs)  # every figure
        found = [figures["chance"] for figures in runs[0].values()]
        assert all(chance["image_to_text/recall@1"] < 0.003 for chance in found)
        assert all(chance["text_to_image/recall@1"] < 0.003 for chance in found)
    assert max(one["largest_difference"] or 0 for one in record["comparison"]) < 1e-6
    assert max(one["largest_difference_of_seeds"] for one in record["comparison"]) < 0.295


@on_processes(2)
def test_two_ranks_agree_with_one(world: Any) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        options = same_accuracy._options(words_of(folder / "icons"))
        tests = {"test": open_pairs(str(folder / "icons" / "test"))}
        losses = {}
        for contender in same_accuracy.CONTENDERS:
            together = World(torch.device(world.device), world.rank, 2)
            config = same_accuracy.configuration(options, contender, 0, together, folder)
            losses[contender] = same_accuracy.measure(config, contender, tests, together)["losses"]
        for contender in ("tiled", "cached"):
            assert losses[contender] == pytest.approx(losses["dense"], rel=1e-4)
