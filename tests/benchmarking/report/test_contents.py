"""The committed page, and pages of made-up records."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from megabatch.benchmarking import command
from megabatch.benchmarking.report import contents, page, record_files

ROOT = Path(__file__).parents[3]
RESULTS, PAGE = ROOT / "benchmarks/results", ROOT / "docs/results.md"


def test_the_committed_page_is_that_of_the_committed_records() -> None:
    files = record_files.read(RESULTS)
    rendered = page.render(files, PAGE.parent, contents.SECTIONS, contents.INTRODUCTION)
    assert rendered == PAGE.read_text("utf-8"), "megabatch bench report writes it anew"


def test_every_committed_record_is_on_the_page() -> None:
    listed = re.findall(r"^- \[(\S+)\.json\]", PAGE.read_text("utf-8"), re.M)
    assert set(listed) == {path.stem for path in RESULTS.glob("*.json")}


def step(contender: str, micro: int, rate: float, **more: Any) -> dict[str, Any]:
    return {
        "contender": contender,
        "model": "ViT-B-32",
        "n_devices": 1,
        "b": 4096,
        "micro_batch_size": micro,
        "seconds": 4096 / rate,
        "pairs_a_second": rate,
        "peak_bytes": 2**30,
        "kept_micro_batches": 0,
        "parts": None,
        **more,
    }


def loss(contender: str, n: int, ms: float, **more: Any) -> dict[str, Any]:
    return {
        "contender": contender,
        "loss": "clip",
        "dtype": "bfloat16",
        "b": 65_536,
        "d": 768,
        "scale": 14.3,
        "n": None,
        "features": "pairs",
        "tf32": False,
        "backward": True,
        "n_devices": n,
        "ms": ms,
        "queued_ms": None,
        "fraction": 0.5,
        "extra_bytes": 2**30 * n,
        "max_row_error": 1e-3,
        "loss_error": 1e-6,
        "scale_gradient_error": 1e-5,
        "of_ideal": None,
        "note": "",
        **more,
    }


def rendered(folder: Path, **records: Any) -> str:
    """The page that the command writes for these files."""
    for name, made in records.items():
        path = folder / f"{name.replace('_', '-')}.json"
        path.write_text(json.dumps({"command": f"measure {name}", "records": made}))
    output = folder / "page.md"
    assert command.main(["report", "--results", str(folder), "--output", str(output)]) == 0
    return output.read_text("utf-8")


def test_steps_are_compared_with_the_fastest_of_openclip(tmp_path: Path) -> None:
    steps = [
        step("megabatch", 512, 700.0),
        step("megabatch", 1024, 800.0),
        step("openclip-compiled", 512, 400.0),
        step("openclip-compiled", 256, 320.0),
        step("openclip", 512, 1.0) | {"status": "out of memory", "pairs_a_second": None},
    ]
    made = rendered(tmp_path, throughput=steps)
    row = "| 800 pairs/s (1,024) | 400 pairs/s (512): 2.00 times | - |"
    assert f"| ViT-B-32, 4,096 pairs, one device {row}" in made
    assert "| OpenCLIP's loop, compiled, 256 | 12.8 s | 320 pairs/s | 1.00 GiB | 0 |" in made
    assert "out of memory" not in made.split("### The paper")[0]
    assert "reported: OpenCLIP, ViT-L/14, 8 A800 | 48.9 s | 97.9 s | - |" in made
    sections = re.findall(r"^## (.*)", made, re.M)
    assert sections == ["How fast is a whole training step?"]


def test_the_loss_stands_beside_its_peers_and_the_paper(tmp_path: Path) -> None:
    made = rendered(
        tmp_path,
        single_gpu=[loss("megabatch", 1, 40.0), loss("openclip", 1, 120.0, extra_bytes=2**36)],
    )
    assert "| megabatch | 40.0 ms, 50.0% |" in made
    assert "| OpenCLIP's over megabatch's | 3.00 times |" in made
    assert "| OpenCLIP's over megabatch's | 64.0 times |" in made
    assert "| reported: OpenCLIP, 8 A800 | 2.27 GB | 8.63 GB | 33.64 GB | out of memory |" in made
    assert "| measured: OpenCLIP's loss, one device | - | 64.0 GiB | - | - | - |" in made
    assert "| computed: their ratio, one device | - | 64.0 times | - | - | - |" in made
    assert "- [single-gpu.json](single-gpu.json).\n  `measure single_gpu`" in made


def test_several_gpus_are_compared_with_one(tmp_path: Path) -> None:
    turns = [
        {**loss("alone", 1, 40.0), "of_ideal": None},
        loss("megabatch", 2, 25.0),
        loss("megabatch-no-overlap", 2, 26.0, of_ideal=0.77),
    ]
    made = rendered(tmp_path, turns_2gpu=turns)
    assert "| 40.0 ms | 25.0 ms on 2 | 80.0% |" in made  # computed: 40 / 2 / 25
    assert "| turns-2gpu: CLIP's loss, 65,536, 2 GPUs | 25.0 ms | 26.0 ms, 77.0% |" in made


def test_accuracy_has_means_and_deviations(tmp_path: Path) -> None:
    def run(seed: int, recall: float, status: str = "ok") -> dict[str, Any]:
        shape = {"data": "icons", "loss": "clip", "batch": 4096, "group": 1024, "steps": 64}
        tests = {name: {"recall@10": recall} for name in ("validation", "in_domain")}
        return {**shape, "lr": 0.002, "seed": seed, "status": status, "losses": [2.0, 1.0]} | (
            {"tests": tests} if status == "ok" else {}
        )

    runs = [run(0, 0.10), run(1, 0.14), run(100, 0.9), run(2, 0.0, "stopped")]
    made = rendered(tmp_path, batch_study=runs)
    figures = "2 | in domain 12.00 ± 2.83% | 1.0000 ± 0.0000 |"
    assert f"| icons, clip | 4,096 | 1,024 | 64 | 0.002 | {figures}" in made


def test_steps_of_a_million_pairs_have_their_parts(tmp_path: Path) -> None:
    split = {"loss": 2.0, "backward pass": 6.0}
    more = {"b": 2**20, "parts": split, "seconds": 8.0, "n_devices": 2, "step": 3}
    made = step("megabatch", 2048, 2**17, **more, lr=1e-4, loss_before=13.25)
    text = rendered(tmp_path, million=[made])
    assert "1,048,576 pairs of ViT-B-32, 2 devices, learning rate 0.0001: step" in text
    assert "1,048,576 pairs in 2,048, step 3 |" in text
    assert "| 3 | 8.00 s | 131,072 pairs/s | 1.00 GiB | 13.2500 |" in text
    assert "| loss | 2.00 s, 25.0% |" in text
