"""The same training with the dense loss, with the tiled one, and with gradient caching.

    python benchmarks/same_accuracy.py
    torchrun --nproc-per-node 2 benchmarks/same_accuracy.py
    torchrun --nproc-per-node 4 benchmarks/same_accuracy.py
    python benchmarks/same_accuracy.py --train-data icons/train --val-data icons/test \\
        --set model=machinery.icon_towers:icon_small force_image_size=32 \\
        --batch-size 8192 --steps 128 --device cuda --precision bf16

`dense` is OpenCLIP's ClipLoss, which forms the matrix of logits (on several ranks with local_loss
and gather_with_grad); `tiled` is this library's; both encode a rank's share of the batch at once.
`cached` is `tiled` with the share in `--micro-batches` micro-batches, all encoded twice. A seed
gives the initial weights and the order of the data, so that runs of one seed differ in rounding
alone. Everything else is the trainer's: its towers, batches, optimizer and schedule. Only the
random shifts of images inside `icon-small` are left out: towers draw them for each call, so a batch
in micro-batches has others than a whole one.

The output is written after each run and read at the beginning, so each call adds what is missing,
on as many ranks as torchrun starts. It has each step's loss, the median of their times, retrieval
on held-out pairs after the last one, and for each contender and number of ranks, compared with
dense on one rank: the largest difference of losses at the same step of the same seed, and means and
deviations over seeds.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from open_clip.loss import ClipLoss as OpenClipLoss

from machinery.icon_towers import VisionTower
from machinery.options import setting
from megabatch import files
from megabatch.benchmarking.records import command_line, environment
from megabatch.config.objective import Objective
from megabatch.config.settings import TrainConfig
from megabatch.data.glyphs import load_glyphs
from megabatch.data.pairs import PairDataset
from megabatch.data.sources import open_pairs
from megabatch.evaluation.captions import CaptionedPairs
from megabatch.evaluation.embed import Encoder
from megabatch.evaluation.tasks import RetrievalTask
from megabatch.training.setup import prepare
from megabatch.training.trainer import Trainer
from megabatch.training.world import World, joined

CONTENDERS = ("dense", "tiled", "cached")
#: Fields that distinguish runs; runs that agree in all but the last three are compared.
KEY = ("data", "precision", "settings", "b", "steps", "contender", "n_devices", "seed")
FIGURES = ("image_to_text/recall@1", "image_to_text/recall@10", "text_to_image/recall@1",
           "text_to_image/recall@10")  # fmt: skip

Record = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> None:
    options = _options(arguments)
    began = time.perf_counter()
    longest = 0.0
    with (
        joined(TrainConfig(device=options.device)) as world,
        tempfile.TemporaryDirectory() as folder,
    ):
        content = world.from_main(_earlier(options.output) if world.main else None)
        tests = held_out(options)
        for seed, contender in itertools.product(range(options.seeds), options.contenders):
            config = configuration(options, contender, seed, world, Path(folder))
            head = describe(config, contender, options, world)
            if any(key(record) == key(head) for record in content["records"]):
                continue
            spent = world.from_main(time.perf_counter() - began)
            if options.budget_seconds and spent + longest > options.budget_seconds:
                break
            record = {**head, **measure(config, contender, tests, world)}
            longest = max(longest, world.from_main(record["seconds"]))
            content["records"].append(record)
            if world.main:
                write(options.output, content)
                print(shown(record), flush=True)


def configuration(
    options: argparse.Namespace, contender: str, seed: int, world: World, folder: Path
) -> TrainConfig:
    """A contender's settings of the trainer."""
    share = -(-options.batch_size // world.size)
    rows = -(-share // options.micro_batches) if contender == "cached" else share
    return TrainConfig(
        train_data=options.train_data,
        output=folder / "run",
        global_batch_size=options.batch_size,
        micro_batch_size=rows,
        activation_memory="0",
        steps=options.steps,
        warmup=max(1, options.steps // 10),
        precision=options.precision,
        device=options.device,
        seed=seed,
        workers=0 if options.device == "cpu" else 8,
        **{"torchcompile": False, **options.set},
    )


def describe(
    config: TrainConfig, contender: str, options: argparse.Namespace, world: World
) -> Record:
    """The fields of a record that are known before the run."""
    on_gpu = world.device.type == "cuda"
    return {
        "contender": contender,
        "data": Path(config.train_data).parent.name or config.train_data,
        "device": torch.cuda.get_device_name(world.device) if on_gpu else "cpu",
        "n_devices": world.size,
        "precision": config.precision,
        "settings": {"model": config.model, "lr": config.lr, **options.set},
        "b": config.global_batch_size,
        "micro_batch_size": config.micro_batch_size,
        "steps": config.steps,
        "seed": config.seed,
    }


def measure(
    config: TrainConfig, contender: str, tests: dict[str, PairDataset], world: World
) -> Record:
    """Train and evaluate; all ranks return the same losses, rank 0 the figures."""
    began = time.perf_counter()
    setup = prepare(config, world)
    for part in setup.towers.module.modules():
        if isinstance(part, VisionTower):
            part.jitter = False
    trainer = Trainer(
        *(setup.config, setup.towers.module, world.device, setup.total_steps, world),
        setup.towers.lengths,
        objective=dense(world) if contender == "dense" else None,
    )
    batches = itertools.chain.from_iterable(itertools.repeat(setup.loader))
    losses, seconds = [], []
    for batch in itertools.islice(batches, setup.total_steps):
        start = time.perf_counter()
        losses.append(trainer.train_step(batch)["loss"])  # a number: the step has ended
        seconds.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated(world.device) if world.device.type == "cuda" else None
    weights = trainer.weights()
    figures: dict[str, Any] = {}
    if world.main:
        setup.towers.module.load_state_dict(weights)
        encoder = Encoder(setup.towers, str(world.device))
        setup.towers.module.eval()
        for name, test in tests.items():
            _, entry, _ = RetrievalTask("pairs", name, CaptionedPairs(test)).score(encoder)
            figures[name] = {kind: entry[kind] for kind in ("model", "chance")}
    return {
        "losses": losses,
        "tests": figures,
        "step_seconds": round(statistics.median(seconds), 5),
        "peak_bytes": peak,
        "seconds": round(time.perf_counter() - began, 2),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def dense(world: World) -> Objective:
    """OpenCLIP's loss over all ranks."""
    loss = OpenClipLoss(
        local_loss=True, gather_with_grad=True, rank=world.rank, world_size=world.size
    )
    return Objective(loss, takes={"logit_scale"})


def held_out(options: argparse.Namespace) -> dict[str, PairDataset]:
    """The test sets: of the glyphs held-out faces and held-out characters."""
    if options.train_data == "glyphs":
        glyphs = load_glyphs()
        return {name: glyphs.split(name) for name in ("faces", "characters")}
    return {"test": open_pairs(options.val_data)}


def key(record: Record) -> tuple[str, ...]:
    """The configuration, by which runs are told apart."""
    return tuple(json.dumps(record[name], sort_keys=True) for name in KEY)


def compare(records: list[Record]) -> list[Record]:
    """Each contender on each number of ranks compared with dense on one rank, over all seeds."""
    groups: dict[tuple[str, ...], list[Record]] = {}
    for record in records:
        groups.setdefault(key(record)[:-1], []).append(record)
    found = []
    for name, runs in groups.items():
        reference = groups.get((*name[:-2], '"dense"', "1"), [])
        same_seed = [(a, b) for a in runs for b in reference if a["seed"] == b["seed"]]
        tests = {
            f"{test}/{figure}": _over([run["tests"][test]["model"][figure] for run in runs])
            for test in runs[0]["tests"]
            for figure in FIGURES
        }
        found.append(
            {
                **{field: runs[0][field] for field in KEY if field != "seed"},
                "seeds": len(runs),
                "largest_difference": _largest(same_seed),
                "largest_difference_of_seeds": _largest(itertools.combinations(runs, 2)),
                "last_loss": _over([run["losses"][-1] for run in runs]),
                "figures": tests,
            }
        )
    return found


def _over(values: list[float]) -> dict[str, float]:
    deviation = statistics.stdev(values) if values[1:] else 0.0
    return {"mean": statistics.fmean(values), "deviation": deviation}


def _largest(pairs: Iterable[tuple[Record, Record]]) -> float | None:
    """The largest difference of two runs' losses at the same step."""
    steps = ((x, y) for a, b in pairs for x, y in zip(a["losses"], b["losses"], strict=True))
    return max((abs(x - y) for x, y in steps), default=None)


def shown(record: Record) -> str:
    """A run in one line."""
    recalls = [
        f"{test} {found['model'][FIGURES[0]]:.2%}" for test, found in record["tests"].items()
    ]
    return (
        f"{record['seconds']:6.1f} s  {record['contender']}, {record['n_devices']} ranks, "
        f"{record['precision']}, seed {record['seed']}: loss {record['losses'][-1]:.5f}, "
        f"recall@1 {', '.join(recalls)}"
    )


def write(output: Path, content: dict[str, Any]) -> None:
    """Write the records, and the comparison that follows from them."""
    commands = content.get("commands", [])
    ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    command = command_line(output)
    if ranks > 1:
        command = f"torchrun --nproc-per-node {ranks} {command.removeprefix('python ')}"
    content |= {
        "commands": [*commands, *([] if command in commands else [command])],
        **environment(),
        "comparison": compare(content["records"]),
    }
    files.write_text(output, json.dumps(content, indent=1, allow_nan=False) + "\n")


def _earlier(output: Path) -> dict[str, Any]:
    if output.exists():
        content: dict[str, Any] = json.loads(output.read_text())
        return content
    return {"comparison": [], "records": []}


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--output", type=Path, default=Path("benchmarks/results/same-accuracy.json")
    )
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--train-data", default="glyphs")
    parser.add_argument("--val-data", help="held-out pairs, if the data are not the glyphs")
    parser.add_argument("--precision", choices=("fp32", "bf16", "fp8"), default="fp32")
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--micro-batches", type=int, default=4, help="of a rank, if cached")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--budget-seconds", type=float)
    parser.add_argument("--set", type=setting, nargs="+", default=[], metavar="NAME=VALUE",
                        help="settings of the trainer")  # fmt: skip
    options = parser.parse_args(arguments)
    options.set = {"model": "glyph-small", **dict(options.set)}
    return options


if __name__ == "__main__":
    main()
