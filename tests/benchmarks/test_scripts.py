"""The scripts in benchmarks/, at sizes that show only that they run."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

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
    assert pictures == {f"r-{name}.png" for name in ("time", "memory", "fraction")}


def test_losses_are_measured_and_plotted(tmp_path: Path) -> None:
    output = tmp_path / "losses.json"
    words = "--smallest", "--device=cpu", "--only=2", "--only=4"
    shown = run("losses.py", *words, f"--output={output}")
    records = json.loads(output.read_text())["records"]
    found = {(r["loss"], r["contender"]): r["status"] for r in records}
    wanted = ("nt-xent", "megabatch"), ("nt-xent", "general"), ("infonce-margin", "megabatch")
    assert found == dict.fromkeys(wanted, "ok")
    assert "3 records" in shown
    run("plots.py", str(output), "--width", "96")
    assert (tmp_path / "losses.png").exists()


def test_blocks_of_several_sizes_are_measured(tmp_path: Path) -> None:
    output = tmp_path / "tiling.json"
    run("tiling.py", "--smallest", "--device=cpu", "--only=1", f"--output={output}")
    records = json.loads(output.read_text())["records"]
    found = {r["contender"]: r["status"] for r in records}
    assert found.pop("dense-compiled") == "skipped"
    assert len(found) == 6
    assert set(found.values()) == {"ok"}


def test_the_plan_covers_what_is_promised() -> None:
    listed = run("single_gpu.py", "--list").splitlines()
    for words in ("b=65536, d=512,", "b=65536, d=1024,", "b=1048576, d=768,", "b=4194304, d=512,"):
        assert any(words in line for line in listed), words
    first = listed[0]
    assert "b=65536, d=768, scale=14.3" in first
    assert "bfloat16" in first


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


def test_late_decoding_gives_the_same_images(tmp_path: Path) -> None:
    output = tmp_path / "late.json"
    words = "--batch-sizes=4", "--undecoded=8", "--micro-batch-size=2", "--workers=1"
    run("late_decoding.py", *words, f"--output={output}")
    early, late, undecoded = json.loads(output.read_text())["records"]
    assert (early["decode"], late["decode"], undecoded["decode"]) == ("early", "late", "late")
    assert early["sum"] == late["sum"] != 0  # of all images, twice: augmented alike
    assert (undecoded["b"], undecoded["passes"], undecoded["sum"]) == (8, 0, 0)
    assert 5_000 < late["file_bytes"] < 100_000
    assert min(r["peak_bytes"] for r in (early, late, undecoded)) > 0


@pytest.mark.concurrency
def test_handshakes_by_sockets_and_by_gloo(tmp_path: Path) -> None:
    output = tmp_path / "h.json"
    run("handshake.py", "--calls=20", f"--output={output}")
    content = json.loads(output.read_text())
    assert content["kinds"] == {"sockets": "SocketChannel", "gloo": "GlooChannel"}
    assert content["processes"] == 2
    times = content["microseconds"]
    assert all(0 < t["min"] <= t["median"] <= t["max"] for t in times.values())


@pytest.mark.concurrency
def test_steps_on_two_hosts(tmp_path: Path) -> None:
    output = tmp_path / "h.json"
    words = "--only=speeds", "--ranks-per-host=1", "--rows=32", "--width=8", "--repetitions=1"
    script = str(SCRIPTS / "two_hosts.py")
    ended = programs.run([script, *words, "--late=0", f"--output={output}", "--speeds"])
    if ended.returncode == 77:
        pytest.skip(ended.stderr)
    assert ended.returncode == 0, ended.stderr
    joined, errors, shapes, link, *steps = json.loads(output.read_text())["records"]
    assert len(joined["joined_s"]) == 2
    assert max(errors["row_error"].values()) < 1e-5
    assert shapes["grids"] == {"default": [1, 1], "gathered": [1, 1]}  # one rank a host
    assert (link["mbit"], link["channel"]) == (None, "GlooChannel")
    assert min(link["measured_mbit"], link["handshake_us"]) > 0
    schedules = {step["schedule"]: step for step in steps}
    assert schedules.keys() == {*errors["row_error"], "no transfers"}
    assert all(step["ms"] > 0 for step in steps)
    least = 2 * 32 * 8 * 4  # the other host's features and a gradient
    assert (
        schedules["default"]["received_bytes"] > schedules["no transfers"]["received_bytes"] + least
    )


def test_two_hosts_say_so_if_they_cannot_be_made() -> None:
    ended = programs.run([str(SCRIPTS / "two_hosts.py")], {**os.environ, "PATH": ""})
    assert ended.returncode == 77
    assert ended.stdout == ""
    assert ended.stderr == (
        "two_hosts.py: no two hosts can be made here: the command unshare is missing\n"
    )


def test_ranking_both_ways(tmp_path: Path) -> None:
    output = tmp_path / "r.json"
    words = "--rows", "250", "20", "--width=8", "--device=cpu"
    run("ranking.py", *words, f"--output={output}")
    made = json.loads(output.read_text())["records"]
    names = ["ranks", "ranks, ids", "topk 1", "topk 10", "topk 50", "topk 200", "topk 10, ids"]
    assert [r["function"] for r in made if r["rows"] == 250] == names
    assert {"topk 50", "topk 200"}.isdisjoint(r["function"] for r in made if r["rows"] == 20)
    assert all(r["different"] == 0 and r["ms"] > 0 and r["blocks_ms"] > 0 for r in made)


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


def test_the_papers_tables(tmp_path: Path) -> None:
    output = tmp_path / "paper-tables.json"
    common = (*tiny_clip(tmp_path), "--device=cpu", "--no-compile", "--micro-batch-size=2")
    words = (*common, "--whole=8", f"--output={output}", "--batch-sizes")
    run("paper_tables.py", *words, "8", "32")
    found = json.loads(output.read_text())["records"]
    assert all(r["status"] == "ok" and r["seconds"] > 0 for r in found)
    lines = [(r["measured"], r["contender"], r["inputs"], r["b"]) for r in found]
    steps = ("megabatch", "host"), ("openclip", "device"), ("megabatch", "device")
    assert lines == [
        *(("step", *line, b) for line in steps for b in (8, 32)),
        *(("loss", name, "device", b) for name in ("megabatch", "openclip") for b in (8, 32)),
    ]
    real = {(r["b"], r["extrapolated"], r["real_micro_batches"]) for r in found[:6]}
    assert real == {(8, False, 4), (32, True, 6)}
    assert run("paper_tables.py", *words, "8", "32", "--list") == ""  # nothing is missing
    listed = run("paper_tables.py", *words, "8", "64", "--list", "--contenders=openclip")
    assert listed.splitlines() == [
        "('step', 'openclip', 'device', 'tiny-clip', 1, 64)",
        "('loss', 'openclip', 'device', 'tiny-clip', 1, 64)",
    ]
    for record in found:
        record["peak_bytes"] = record["peak_bytes"] or 2**30  # no allocator counts on the CPU
    output.write_text(json.dumps({"machine": {"cpu": "a", "cores": 2}, "records": found}))
    run("plots.py", str(output))
    assert (tmp_path / "paper-tables.png").exists()


def test_towers_alone(tmp_path: Path) -> None:
    output = tmp_path / "towers.json"
    words = "--micro-batch-sizes=4", "--lengths=16", "--compiled=0", "--seconds=0"
    run("towers.py", *tiny_clip(tmp_path), *words, f"--output={output}", "--device=cpu")
    twice, once = json.loads(output.read_text())["records"]
    assert (twice["contender"], once["contender"]) == ("twice", "once")
    assert (once["b"], once["tokens"], once["compiled"]) == (4, 16, False)
    assert min(twice["pairs_a_second"], once["pairs_a_second"]) > 0


@pytest.mark.concurrency
def test_openclip_trainer(tmp_path: Path) -> None:
    output = tmp_path / "o.json"
    words = "--processes=1", "--accum-freq=2", "--steps=2", "--batch-size=8"
    run_here("openclip_trainer.py", *words, "--contenders=megabatch", f"--output={output}")
    (found,) = json.loads(output.read_text())["records"]
    assert (found["status"], found["b"], found["accum_freq"]) == ("ok", 8, 2)
    assert found["seconds"] > 0 < found["extra_bytes"]
    assert found["first_loss"] != found["last_loss"]
    assert found["loss_difference"] is None  # OpenCLIP's own run was not asked for


@pytest.mark.concurrency
def test_retriever(tmp_path: Path) -> None:
    output = tmp_path / "retriever.json"
    run("retriever.py", "--smallest", f"--output={output}")
    theirs, ours, trainer = json.loads(output.read_text())["records"]
    assert (theirs["contender"], ours["contender"]) == ("sentence-transformers", "megabatch")
    assert trainer["loss_difference"] < 1e-5
    assert trainer["recall_before"] == theirs["recall_before"]
    assert trainer["losses"][-1] < trainer["losses"][0]
    assert len(ours["losses"]) == ours["steps"] == 3
    assert ours["loss_difference"] < 1e-5
    assert ours["weight_difference"] < 1e-2  # AdamW's first steps divide gradients by themselves
    assert ours["recall_before"] == theirs["recall_before"]
    assert ours["recall_after"] == pytest.approx(theirs["recall_after"], abs=0.01)
    assert 0 < ours["seconds"] < ours["loop_seconds"]
