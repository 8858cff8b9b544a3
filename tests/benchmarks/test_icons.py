"""benchmarks/icons.py and icons_package.py on a made-up package."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from machinery.iconify import open_package
from megabatch.training import TrainConfig
from tests.benchmarks.machinery.iconify_set import write_tarball
from tests.benchmarks.test_scripts import SCRIPTS, run


def load(script: str) -> ModuleType:
    name = f"benchmarks_{script}"
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{script}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_ways_of_duplicates_side_by_side(tmp_path: Path) -> None:
    output = tmp_path / "icons.json"
    write_tarball(tmp_path / "package.tgz")
    small = "model=glyph-small", "global_batch_size=4", "micro_batch_size=2", "plan=off"
    # tests/training/test_gpu.py has compilation; in bfloat16 two losses' roundings grow apart.
    small += ("torchcompile=false", "precision=fp32")
    words = "--seconds-per-run=0", "--workers=0", "--device=cpu"
    run(
        "icons.py",
        f"--package={tmp_path / 'package.tgz'}",
        f"--output={output}",
        *words,
        *("--duplicates", "negatives", "positives"),
        *("--set", *small),
    )
    content = json.loads(output.read_text())
    assert content["data"]["train"] == {"pairs": 8, "captions": 8, "sharing": 0}
    assert content["data"]["test"] == {
        "pairs": 1,
        "captions": 1,
        "sharing": 0,
        "of_captions_in_train": 0,
    }
    negatives, positives = content["records"]
    assert (negatives["duplicates"], positives["duplicates"]) == ("negatives", "positives")
    assert negatives["steps"] == positives["steps"] == 8
    assert negatives["recall"]["image_to_text/recall@1"] == 1.0  # of one
    assert 0 <= negatives["data_wait"] < 1
    assert negatives["pairs_per_second"] > 0
    # Without a caption that occurs twice there is nothing to change.
    assert negatives["loss"] == pytest.approx(positives["loss"], abs=1e-4)


def test_a_budget_decides_on_steps_and_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    icons, test = load("icons"), tmp_path / "icons" / "test"
    asked: list[tuple[str, int]] = []

    def measure(config: TrainConfig, given: Path) -> dict[str, Any]:
        assert given == test
        asked.append((config.duplicates, config.steps))
        return {"training_seconds": 0.0, "step_ms": 1_000.0}

    monkeypatch.setattr(icons, "measure", measure)
    monkeypatch.setattr(icons, "time", SimpleNamespace(perf_counter=lambda: 1_040.0))
    config, began = TrainConfig(), 1_000.0

    def plan(*words: str) -> Any:
        return icons.choose_steps(icons._options([*words]), config, tmp_path, began)

    three = plan("--budget-seconds=260", "--least-steps=60")
    assert asked == [("positives", 8)]
    assert (three.runs, three.steps) == (3, 69)  # 0.95 of 220 s, a third of them
    assert not three.late(began, 260)
    assert three.late(began - 200, 260)
    two = plan("--budget-seconds=260", "--least-steps=100")
    assert (two.runs, two.steps) == (2, 104)
    one = plan("--budget-seconds=260", "--least-steps=1000")
    assert (one.runs, one.steps) == (1, 209)
    by_run = plan("--seconds-per-run=7.5", "--least-steps=100")
    assert (by_run.runs, by_run.steps) == (3, 8)
    assert not by_run.late(began - 1e6, None)
    given = plan("--steps=5")
    assert (given.runs, given.steps, given.trial) == (3, 5, None)


def test_what_finds_no_time_is_said(tmp_path: Path) -> None:
    output = tmp_path / "icons.json"
    write_tarball(tmp_path / "package.tgz")
    small = "model=glyph-small", "global_batch_size=4", "micro_batch_size=2", "plan=off"
    small += ("torchcompile=false",)
    load("icons").main(
        [
            *(f"--package={tmp_path / 'package.tgz'}", f"--output={output}"),
            "--budget-seconds=1e-3",
            *("--workers=0", "--device=cpu", "--duplicates", "positives", "negatives"),
            *("--set", *small),
        ]
    )
    content = json.loads(output.read_text())
    assert content["trial"]["steps"] == 8
    left_out = [
        {"duplicates": d, "status": "left out: no time"} for d in ("positives", "negatives")
    ]
    assert content["records"] == left_out


def test_a_smaller_package_has_the_same_short_icons(tmp_path: Path) -> None:
    whole, small = write_tarball(tmp_path / "package.tgz"), tmp_path / "small.tar.xz"
    with open_package(whole) as package:
        count = load("icons_package").write(package, small, max_bytes=43, preset=0)
    with open_package(whole) as package:
        expected = {of.prefix: of for of in package.sets()}
    with open_package(small) as package:
        kept = {of.prefix: of for of in package.sets()}
    assert count == 4  # of those with a picture of their own; aliases are not among them
    assert kept.keys() == expected.keys()
    assert kept["bi2-solid"].icons == expected["bi2-solid"].icons  # held out: whole
    for prefix in ("plain", "brands"):
        names = {icon.name for icon in kept[prefix].icons}
        by_name = {icon.name: icon for icon in expected[prefix].icons}
        assert all(by_name[icon.name] == icon for icon in kept[prefix].icons)
        assert 0 < len(names) < len(by_name)
    assert "wide-up" in {icon.name for icon in kept["plain"].icons}  # an alias of an alias stays
