"""The scripts in benchmarks/, at sizes that show only that they run."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import retriever
import single_gpu
from tests import programs

SCRIPTS = Path(__file__).parents[2] / "benchmarks"

if sys.platform != "linux":
    pytest.skip("the CPU is measured on Linux only", allow_module_level=True)


def run(script: str, *words: str) -> str:
    ended = programs.run([str(SCRIPTS / script), *words])
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def run_here(script: str, *words: str) -> None:
    """In this process, so that the programs which it starts can be forked."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [str(SCRIPTS / script), *words])
        patch.setattr(subprocess, "run", programs.completed)
        with pytest.raises(SystemExit, match=r"^0$"):
            runpy.run_path(sys.argv[0], run_name="__main__")


def test_late_interaction(tmp_path: Path) -> None:
    output = tmp_path / "maxsim.json"
    shown = run("maxsim.py", "--device=cpu", "--shape", "4", "3", "5", "8", f"--output={output}")
    assert "megabatch" in shown
    rows = json.loads(output.read_text())["records"]
    assert [(row["contender"], row["status"]) for row in rows] == [
        ("megabatch", "ok"),
        ("dense", "ok"),
    ]


def test_single_gpu_measures_records_and_is_plotted(tmp_path: Path) -> None:
    output = tmp_path / "r.json"
    wanted = (
        "--only=0",
        "--only=3",
        "--contenders",
        "megabatch",
        "dense",
        "dense-compiled",
        "memeff",
    )
    shown = run("single_gpu.py", "--smallest", *wanted, f"--output={output}")
    content = json.loads(output.read_text())
    status = {(r["contender"], r["b"]): r["status"] for r in content["records"]}
    assert status["megabatch", 128] == status["megabatch", 64] == status["dense", 64] == "ok"
    assert status["dense-compiled", 64] == "skipped"
    assert status["memeff", 64] in ("not installed", "skipped")
    assert f"{len(status)} records" in shown
    run("plots.py", str(output), "--width", "96")
    pictures = {path.name for path in tmp_path.glob("*.png")}
    assert pictures == {f"r-{name}.png" for name in ("time", "memory")}


def test_losses_are_measured(tmp_path: Path) -> None:
    output = tmp_path / "losses.json"
    words = "--smallest", "--device=cpu", "--only=2", "--only=4"
    shown = run("losses.py", *words, f"--output={output}")
    records = json.loads(output.read_text())["records"]
    found = {(r["loss"], r["contender"]): r["status"] for r in records}
    wanted = ("nt-xent", "megabatch"), ("nt-xent", "general"), ("infonce-margin", "megabatch")
    assert found == dict.fromkeys(wanted, "ok")
    assert "3 records" in shown


def test_the_plan_covers_what_is_promised() -> None:
    sizes = [(group.case.b, group.case.d) for group in single_gpu.groups()]
    assert {(65_536, 512), (65_536, 1024), (1_048_576, 768), (4_194_304, 512)} <= {*sizes}
    assert sizes[0] == (65_536, 768)


def test_exactness(tmp_path: Path) -> None:
    output = tmp_path / "e.json"
    run("exactness.py", f"--output={output}", "--batch-size=512", "--width=16", "--device=cpu")
    made = json.loads(output.read_text())["records"]
    assert len(made) == 2 * 4 * 2 * 3
    worst = {
        r["contender"]: r["gradient_max"]
        for r in made
        if (r["dtype"], r["features"], r["scale"]) == ("bfloat16", "trained", 14.3)
    }
    assert worst["megabatch"] < 6e-3
    assert worst["megabatch"] < 2 * worst["dense, careful"]


@pytest.mark.concurrency
def test_the_loaders_rate_and_the_trainers_wait_are_measured(tmp_path: Path) -> None:
    output = tmp_path / "rate.json"
    words = "--images=64", "--size=64", "--workers=1", "--resize=pillow", "--seconds=0"
    training = "--model=glyph-small", "--batch-size=4", "--micro-batch-size=4", "--steps=2"
    run("data_rate.py", *words, *training, "--device=cpu", f"--output={output}")
    records = json.loads(output.read_text())["records"]
    stages = {(r["contender"], r["stage"]): r["ms"] for r in records if r["kind"] == "stage"}
    assert {("pillow", "crop and resize"), ("torch", "crop and resize")} <= stages.keys()
    assert all(ms >= 0 for ms in stages.values())
    loader, trained = records[-2:]
    assert (loader["kind"], loader["contender"], loader["workers"]) == ("loader", "pillow", 1)
    assert loader["images_per_second"] > 0
    assert loader["worker_ms"] >= 0
    assert trained["kind"] == "training"
    assert len(trained["data_waits"]) == 2
    assert trained["data_wait"] == trained["data_waits"][-1]


def tiny_clip(folder: Path) -> tuple[str, str]:
    """Options for a small OpenCLIP model that is the same in every pass."""
    model = folder / "tiny-clip.json"
    config = json.loads((SCRIPTS.parent / "tests/models/megabatch-test-tiny.json").read_text())
    del config["vision_cfg"]["patch_dropout"]
    model.write_text(json.dumps(config))
    return f"--models={model.stem}", f"--model-config={model}"


def test_throughput_beside_openclip(tmp_path: Path) -> None:
    output = tmp_path / "throughput.json"
    common = (*tiny_clip(tmp_path), "--device=cpu", "--steps=1", f"--output={output}")
    small = "--batch-sizes", "8", "24", "--micro-batch-sizes", "8", "--set", "micro_batch_size=8"
    run("throughput.py", *common, *small, "--parts")
    first = json.loads(output.read_text())["records"]
    assert [(r["contender"], r["b"], r["status"]) for r in first] == [
        (name, size, "ok") for size in (8, 24) for name in ("megabatch-eager", "openclip")
    ]
    for mine, theirs in zip(first[::2], first[1::2], strict=True):
        assert mine["loss_difference"] is None
        assert 0 < theirs["loss_difference"] < 2e-3  # rounding: in bfloat16, bytes or floats
        assert mine["tokens"] == theirs["tokens"]
        assert min(mine["pairs_a_second"], theirs["pairs_a_second"]) > 0
        assert {"texts, first pass", "loss", "backward pass", "optimizer"} <= set(mine["parts"])
        assert theirs["parts"] is None
    assert "images, second pass" in first[2]["parts"]
    assert 5 < first[2]["tokens"]["median"] <= first[2]["tokens"]["max"] == 16

    # Another setting is a record of its own, the same one replaces its record.
    small = "--batch-sizes=24", "--micro-batch-sizes=8", "--set", "micro_batch_size=8"
    run("throughput.py", *common, *small, "trim_texts=False", "--append")
    records = json.loads(output.read_text())["records"]
    assert records[:3] == first[:3]
    assert [(r["contender"], r["b"]) for r in records[3:]] == [
        ("megabatch-eager", 24),
        ("openclip", 24),
    ]
    assert records[3]["settings"] == {**first[0]["settings"], "trim_texts": False}

    # The texts of OpenCLIP's micro-batches cut as ours: the same loss.
    run("throughput.py", *common, *small[:2], "--contenders=openclip-short", "--append")
    last = json.loads(output.read_text())["records"][-1]
    assert (last["contender"], last["status"]) == ("openclip-short", "ok")
    assert last["first_loss"] == pytest.approx(records[-1]["first_loss"], rel=2e-3)


def test_step_time(tmp_path: Path) -> None:
    output = tmp_path / "step-time.json"
    words = "--smallest", "--kept", "1", "8", *tiny_clip(tmp_path), f"--output={output}"
    run("step_time.py", *words)
    first, second = json.loads(output.read_text())["records"]
    assert [(r["b"], r["micro_batches"]) for r in (first, second)] == [(16, 2), (64, 4)]
    for record in first, second:
        families = record["families"].values()
        assert sum(family["seconds"] for family in families) == pytest.approx(record["seconds"])
        assert sum(family["share"] for family in families) == pytest.approx(1)
    assert second["parts"]["images, first pass"]["products"] == 0  # all are kept
    assert first["parts"]["images, first pass"]["products"] > 0


@pytest.mark.concurrency
def test_openclip_trainer(tmp_path: Path) -> None:
    output = tmp_path / "o.json"
    words = "--processes=1", "--accum-freq=2", "--steps=2", "--batch-size=8"
    run_here("openclip_trainer.py", *words, "--contenders=megabatch", f"--output={output}")
    (found,) = json.loads(output.read_text())["records"]
    assert (found["status"], found["b"], found["accum_freq"]) == ("ok", 8, 2)
    assert found["seconds"] > found["waiting"] > 0 < found["extra_bytes"]
    assert found["first_loss"] != found["last_loss"]
    assert found["loss_difference"] is None  # OpenCLIP's own run was not asked for


def test_retriever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[set[bool]] = []

    def called(forward: Callable[..., Any], *, dynamic: bool) -> Callable[..., Any]:
        """In place of `torch.compile`: what is called, with or without gradients."""
        compiled.append(set())
        modes = compiled[-1]

        def call(*args: Any, **kwargs: Any) -> Any:
            modes.add(torch.is_grad_enabled())
            return forward(*args, **kwargs)

        return call

    output = tmp_path / "retriever.json"
    words = "--smallest", "--compile", f"--output={output}"
    monkeypatch.setattr(sys, "argv", ["retriever.py", *words])
    monkeypatch.setattr(torch, "compile", called)
    # Old releases of accelerate add to the environment, and the script changes torch's limit.
    with mock.patch.dict(os.environ), torch._dynamo.config.patch(recompile_limit=8):
        retriever.main()
    theirs, ours, trainer = json.loads(output.read_text())["records"]
    assert (theirs["contender"], ours["contender"]) == ("sentence-transformers", "megabatch")
    assert trainer["loss_difference"] < 1e-5
    assert len(ours["losses"]) == len(ours["all_seconds"]) == ours["steps"] == 3
    assert ours["loss_difference"] < 1e-5
    assert [steps for steps, _, _ in ours["curve"]] == [0, 2]
    assert ours["curve"][0] == theirs["curve"][0] == trainer["curve"][0]
    assert ours["curve"][1][1:] == pytest.approx(theirs["curve"][1][1:], abs=0.01)
    assert len({loss for _, _, loss in trainer["curve"]}) == 2  # of the weights then
    assert compiled == [{False, True}] * 2  # the library's encoder, with both losses
