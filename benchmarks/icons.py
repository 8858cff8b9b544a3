"""The effect of known duplicates on a vision transformer for icons, with a batch of 32,768.

    python benchmarks/icons.py --package icons.tar.xz --output benchmarks/results/icons.json

Renders the package's icons, then trains the configuration `icons.toml` once for each treatment
of pairs with the same caption: as negatives (without ids, the control), ignored, as positives; with
the same steps, seed and batches. Each run is followed by retrieval on the held-out sets in both
directions, and by an update of the record, so an interrupted run leaves its results so far.

The number of steps is --steps, or fits the time, as estimated by a short trial: --seconds-per-run
of training, or --budget-seconds for everything. If the budget does not suffice for --least-steps in
each run, the last values of --duplicates are skipped. Nothing is downloaded; icons_package.py makes
a smaller package.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import torch

from machinery.icon_set import write_icons
from machinery.icon_towers import IMAGE_SIZE
from machinery.iconify import open_package
from megabatch.benchmarking.records import command_line, environment
from megabatch.config.settings import resolve_device
from megabatch.data.grey import IMAGES, GreyPairs
from megabatch.evaluation.captions import CaptionedPairs
from megabatch.evaluation.embed import Encoder
from megabatch.evaluation.run_folder import open_run
from megabatch.evaluation.tasks import pairs_task, score
from megabatch.training import TrainConfig, load_config, train
from megabatch.training.trainer import TrainingStopped

DUPLICATES = ("negatives", "ignored", "positives")
WARMING_STEPS = 3  # workers start and kernels are selected; excluded from speeds
TRIAL_STEPS = 8


def main(arguments: Sequence[str] | None = None) -> None:
    options = _options(arguments)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="megabatch-icons-") as scratch:
        folder = options.work or Path(scratch)
        content: dict[str, Any] = {
            "command": command_line(options.output),
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            **environment(),
            "data": prepare(options, folder / "icons"),
            "records": [],
        }
        config = configure(options, folder / "icons")
        plan = choose_steps(options, config, folder, began)
        content["trial"] = plan.trial
        for number, duplicates in enumerate(options.duplicates):
            if number < plan.runs and not plan.late(began, options.budget_seconds):
                run = config_of(config, folder / duplicates, plan.steps, duplicates)
                record = attempt(run, folder / "icons" / "test")
            else:
                record = {"duplicates": duplicates, "status": "left out: no time"}
            content["records"].append(record)
            content["seconds"] = round(time.perf_counter() - began, 1)
            _write(options.output, content)
            print(json.dumps(content["records"][-1]), flush=True)


@dataclass(frozen=True)
class Plan:
    """The number of runs that fit into the time, and of their steps; run_seconds: of each run."""

    runs: int
    steps: int
    run_seconds: float = 0.0
    trial: dict[str, Any] | None = None

    def late(self, began: float, budget: float | None) -> bool:
        """Whether another run would exceed the budget."""
        return budget is not None and time.perf_counter() - began + self.run_seconds > budget


def prepare(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Draw the icons; says how many there are, how many share a caption, and how long it took."""
    began = time.perf_counter()
    if not folder.exists():
        with open_package(options.package) as package:
            write_icons(package, folder, size=IMAGE_SIZE, workers=options.workers)
    seconds = time.perf_counter() - began
    found: dict[str, Any] = {"package": json.loads((folder / "sets.json").read_text())["package"]}
    ids = {}
    for split in ("train", "test"):
        pairs = GreyPairs(folder / split)
        ids[split] = Counter(pairs.ids(range(len(pairs))).tolist())
        shared = sum(count for count in ids[split].values() if count > 1)
        found[split] = {"pairs": len(pairs), "captions": len(ids[split]), "sharing": shared}
    seen = sum(count for one, count in ids["test"].items() if one in ids["train"])
    found["test"]["of_captions_in_train"] = seen
    print(f"drawn: {found}, {seconds:.0f} s", flush=True)
    return {**found, "drawing_seconds": round(seconds, 1), "drawing_workers": options.workers}


def configure(options: argparse.Namespace, icons: Path) -> TrainConfig:
    """The configuration with the command line's changes."""
    known = {field.name for field in fields(TrainConfig)}
    changes: dict[str, Any] = {}
    for setting in options.set:
        name, _, value = setting.partition("=")
        if name not in known:
            raise SystemExit(f"--set {setting}: {name} is no setting of a run")
        changes[name] = _value(value)
    config = replace(
        load_config(options.config, trust=True),
        train_data=str(icons / "train"),
        device=options.device,
        workers=options.workers,
        seed=options.seed,
        log_every=1,
        checkpoint_every=0,
    )
    return replace(config, **changes)


def config_of(config: TrainConfig, output: Path, steps: int, duplicates: Any) -> TrainConfig:
    """One run's configuration: a tenth of the steps warm up."""
    warmup = min(config.warmup or 0, max(1, steps // 10))
    return replace(config, output=output, steps=steps, warmup=warmup, duplicates=duplicates)


def measure(config: TrainConfig, test: Path) -> dict[str, Any]:
    """Train, evaluate, and return the figures."""
    device = resolve_device(config.device)
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    began = time.perf_counter()
    if code := train(config):
        raise SystemExit(code)
    seconds = time.perf_counter() - began
    log = _log(config.output)
    steady = log[min(WARMING_STEPS, len(log) - 1) :]
    step_seconds = [config.global_batch_size / line["pairs_per_second"] for line in steady]
    waited = sum(t * line["data_wait"] for t, line in zip(step_seconds, steady, strict=True))
    return {
        "duplicates": config.duplicates,
        "status": "ok",
        "model": config.model,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "n_devices": 1,
        "dtype": config.precision,
        "b": config.global_batch_size,
        "micro_batch_size": config.micro_batch_size,
        "steps": config.steps,
        "epochs": round(config.steps * config.global_batch_size / _count(config.train_data), 1),
        "lr": config.lr,
        "seed": config.seed,
        "seconds": round(seconds, 1),
        "training_seconds": round(log[-1]["seconds"], 1),
        "step_ms": round(1e3 * statistics.median(step_seconds), 1),
        "pairs_per_second": round(config.global_batch_size * len(steady) / sum(step_seconds)),
        "data_wait": round(waited / sum(step_seconds), 4),
        "memory_bytes": max(line["memory_bytes"] for line in log),
        "loss": log[-1]["loss"],
        "logit_scale": log[-1]["logit_scale"],
        **evaluate(config.output, test, str(device)),
    }


def evaluate(run: Path, test: Path, device: str) -> dict[str, Any]:
    """Retrieval among the held-out sets' icons and their captions."""
    began = time.perf_counter()
    towers = open_run(run, trust=True).towers
    towers.module.to(device)
    task = pairs_task("icons", CaptionedPairs(GreyPairs(test)))
    entry, _ = score(Encoder(towers, device), task)
    return {
        "parameters": sum(p.numel() for p in towers.module.parameters()),
        "evaluated_images": entry["images"],
        "evaluated_texts": entry["texts"],
        "recall": entry["model"],
        "chance": entry["chance"],
        "evaluation_seconds": round(time.perf_counter() - began, 1),
    }


def choose_steps(
    options: argparse.Namespace, config: TrainConfig, folder: Path, began: float
) -> Plan:
    """How long the runs may be, as a short one shows; what is not part of its steps counts too."""
    wanted = len(options.duplicates)
    if options.steps:
        return Plan(wanted, options.steps)
    # The learning rate only begins to rise: the run is for timing and must not diverge.
    trial = replace(
        config_of(config, folder / "trial", TRIAL_STEPS, "positives"), warmup=TRIAL_STEPS
    )
    started = time.perf_counter()
    found = measure(trial, folder / "icons" / "test")
    beside = time.perf_counter() - started - found["training_seconds"]
    step = found["step_ms"] / 1e3
    shown = {"steps": TRIAL_STEPS, "step_ms": found["step_ms"], "seconds_beside": round(beside, 1)}

    def within(runs: int) -> int:
        if options.budget_seconds is None:
            return int(options.seconds_per_run / step)
        left = 0.95 * (options.budget_seconds - (time.perf_counter() - began))
        return int((left / runs - beside) / step)

    runs = next((n for n in range(wanted, 1, -1) if within(n) >= options.least_steps), 1)
    if options.budget_seconds is None:
        runs = wanted
    steps = max(TRIAL_STEPS, within(runs))
    print(f"{step:.3f} s a step, {beside:.1f} s beside: {runs} runs of {steps} steps", flush=True)
    return Plan(runs, steps, beside + steps * step, shown)


def attempt(config: TrainConfig, test: Path) -> dict[str, Any]:
    """Train and evaluate, or return the reason why it stopped."""
    try:
        return measure(config, test)
    except TrainingStopped as error:  # such as divergence; continue with the others
        return {"duplicates": config.duplicates, "status": str(error)}


def _count(icons: str) -> int:
    return len(np.load(Path(icons) / IMAGES, mmap_mode="r"))


def _log(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _write(path: Path, content: dict[str, Any]) -> None:
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")
    os.replace(partial, path)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--package", type=Path, help="npm's tarball, its folder, or a smaller one")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/icons.json"))
    parser.add_argument("--work", type=Path, help="folder to work in and keep; default: a new one")
    own = Path(__file__).with_name("icons.toml")
    parser.add_argument("--config", type=Path, default=own, help="a TOML file")
    parser.add_argument("--set", nargs="+", default=[], metavar="NAME=VALUE", help="of the config")
    parser.add_argument("--duplicates", nargs="+", choices=DUPLICATES, default=list(DUPLICATES))
    parser.add_argument("--steps", type=int, help="of each run, instead of --seconds-per-run")
    parser.add_argument("--seconds-per-run", type=float, default=100.0, help="of training alone")
    parser.add_argument("--budget-seconds", type=float, help="of everything; instead of the former")
    parser.add_argument("--least-steps", type=int, default=66, help="worth a run, with a budget")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
