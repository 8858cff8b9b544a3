"""Where a step's time goes: seconds by kernel family, and the share of the rate of products.

    python benchmarks/step_time.py --output benchmarks/results/step-time.json

A step of the trainer is profiled with a few micro-batches, each encoded twice, and with the loss of
a whole batch, for which their features are repeated. A step without the profiler, which makes
launches slower, tells how long each part takes. The step of the whole batch follows: the first
passes of all micro-batches but those whose activations are `--kept`, the second passes of all, loss
and optimizer once. Models are OpenCLIP's, on random images and WordNet's definitions, or `minilm`
and `bert-base`: BERTs with random weights, on WordNet's words and definitions.

`--smallest` has tiny micro-batches on the CPU, not compiled, which only shows that it runs.
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import open_clip
import torch

from machinery.definitions import tokenized, words_and_definitions
from machinery.kernels import TRANSFERS, Profile
from machinery.parts import AFTER_LOSS, WAITING, Parts
from machinery.steps import Megabatch, make_pairs
from megabatch.benchmarking import records
from megabatch.benchmarking.clock import product_rate
from megabatch.data import Batch
from megabatch.training.trainer import Trainer
from megabatch.training.world import World

#: Models with micro-batches of about the sizes that the trainer chooses on an H200.
MODELS = {
    **{"ViT-B-32": 2048, "ViT-B-16": 512, "ViT-L-14": 512},
    **{"minilm": 4096, "bert-base": 2048},
}
LONGEST = 100  #: kernels that a record has


@dataclass(frozen=True)
class Family:
    """The kernels of a family in a step."""

    seconds: float
    share: float  #: of the step
    operations: float  #: of products and attention
    of_rate: float  #: operations a second, as a share of the rate of large products


@dataclass(frozen=True)
class Record:
    """A step of one model and batch size."""

    model: str
    device: str
    n_devices: int
    dtype: str
    b: int
    micro_batch_size: int
    micro_batches: int  #: that were profiled
    kept_micro_batches: int  #: of the step: encoded once
    seconds: float  #: of the step
    profiled_seconds: float  #: of the step that was profiled
    unprofiled_seconds: float  #: of the same without the profiler
    product_tflops: float  #: the rate of large products
    families: dict[str, Family]  #: without transfers, which are hidden, they add up to `seconds`
    parts: dict[str, dict[str, float]]  #: seconds by part and family
    kernels: list[tuple[str, str, float]]  #: part, name and seconds of those that take longest


def main() -> None:
    options = arguments()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    found: list[Any] = []
    if options.append and options.output.exists():
        found = json.loads(options.output.read_text())["records"]
        found = [record for record in found if record["model"] not in options.models]
    for model in options.models:
        torch._dynamo.reset()
        rows = options.micro_batch_size or MODELS[model]
        trainer, whole = prepared(model, rows, options)
        for size, kept in zip(options.batch_sizes, options.kept, strict=True):
            if kept > (most := -(-size // rows)):
                raise SystemExit(
                    f"--kept {kept}: expected at most {most}, the micro-batches of {size:,} pairs"
                )
            count = min(options.micro_batches, -(-size // rows))
            n = min(size, rows * count)
            batch = Batch(whole.images[:n], whole.texts[:n], torch.arange(n))
            for _ in range(3):  # in the first one the loss compiles its kernels for so many pairs
                with Parts(trainer, repeats=size // n) as parts:
                    trainer.train_step(batch)
            lengths = parts.seconds()
            rate = product_rate(options.device, torch.bfloat16, options.product, options.seconds)
            with Profile(trainer, repeats=size // n) as profile:
                trainer.train_step(batch)
            found.append(
                Record(
                    model=model,
                    device=torch.cuda.get_device_name() if options.device == "cuda" else "cpu",
                    n_devices=1,
                    dtype="bfloat16",
                    b=size,
                    micro_batch_size=rows,
                    micro_batches=count,
                    kept_micro_batches=kept,
                    profiled_seconds=sum(profile.lengths.values()),
                    unprofiled_seconds=sum(lengths.values()),
                    product_tflops=rate / 1e12,
                    **of_step(profile, lengths, size / n * count, kept, count, rate),
                )
            )
            print(shown(found[-1]), flush=True)
            records.write(options.output, records.command_line(options.output), found)
        del trainer, whole, batch, profile
        gc.collect()


def prepared(model: str, rows: int, options: argparse.Namespace) -> tuple[Trainer, Batch]:
    """A trainer that keeps no activations, and a batch of a few micro-batches."""
    size, world = rows * options.micro_batches, World(torch.device(options.device))
    settings: dict[str, Any] = {"micro_batch_size": rows, "activation_memory": 0}
    settings |= {"torchcompile": options.device != "cpu"}
    if model not in ("tiny", "minilm", "bert-base"):
        contender = Megabatch(model, size, world, settings)
        pairs = make_pairs(contender.towers, size, world)
        return contender.trainer, Batch(pairs.bytes(), pairs.tokens, torch.arange(size))
    from retriever import random_bert  # needs sentence-transformers

    texts = words_and_definitions()
    with tempfile.TemporaryDirectory() as folder:
        name = f"hf:{random_bert(model, texts, Path(folder) / 'bert')}"
        contender = Megabatch(name, size, world, {"loss": "infonce", **settings})
        sides = [
            tokenized(contender.towers.tokenizer, side) for side in zip(*texts[:size], strict=True)
        ]
    return contender.trainer, Batch(*sides, torch.arange(size))


def of_step(
    profile: Profile,
    lengths: dict[str, float],
    count: float,
    kept: int,
    profiled: int,
    rate: float,
) -> dict[str, Any]:
    """The fields of a record about a step of `count` micro-batches.

    `lengths`: seconds of each part of the step that was profiled, which had `profiled` of them.
    """
    parts: dict[str, dict[str, float]] = {}
    operations, kernels = Counter[str](), Counter[tuple[str, str]]()
    for part, length in lengths.items():
        first = part == WAITING or "first" in part
        times = (count - kept * first) / profiled
        if part in ("loss", AFTER_LOSS, "optimizer", "rest"):
            times = 1.0
        families = profile.seconds_by_family(part, length)
        parts[part] = {name: times * s for name, s in families.items()}
        for event in profile.kernels[part]:
            kernels[part, event.name] += times * event.seconds  # type: ignore[assignment]
        for name, number in profile.operations[part].items() if part != "loss" else ():
            operations[name] += times * number  # type: ignore[assignment]
    sums = Counter[str]()
    for of_part in parts.values():
        sums.update(of_part)  # type: ignore[arg-type]
    total = sum(seconds for name, seconds in sums.items() if name != TRANSFERS)
    found = {}
    for name, seconds in sums.most_common():
        of_rate = operations[name] / seconds / rate if seconds else 0.0
        found[name] = Family(seconds, seconds / total, operations[name], of_rate)
    longest = [(*key, seconds) for key, seconds in kernels.most_common(LONGEST)]
    return {"seconds": total, "families": found, "parts": parts, "kernels": longest}


def shown(record: Record) -> str:
    """A record as a table."""
    lines = [
        f"{record.model}, {record.b:,} pairs, {record.device}: {record.micro_batch_size:,} at a "
        f"time, {record.kept_micro_batches} kept: {record.seconds:.3f} s, "
        f"{record.b / record.seconds:,.0f} pairs/s; profiled {record.profiled_seconds:.3f} s, "
        f"unprofiled {record.unprofiled_seconds:.3f} s; rate {record.product_tflops:.1f} TFLOP/s"
    ]
    for name, family in record.families.items():
        rate = f"{family.of_rate:7.1%} of the rate" if family.operations else ""
        lines.append(f"  {name:30}{family.seconds:9.3f} s{family.share:8.1%}  {rate}")
    lines.extend(f"    {s:9.4f} s  {part}: {name[:110]}" for part, name, s in record.kernels[:12])
    return "\n".join(lines)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=[*MODELS])
    parser.add_argument("--model-config", type=Path, help="one that open_clip does not bring")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[4096, 32768])
    parser.add_argument("--micro-batch-size", type=int, help="default: each model's own")
    parser.add_argument("--micro-batches", type=int, default=4, help="that are profiled")
    parser.add_argument(
        "--kept", type=int, nargs="+", help="micro-batches of a step, for each size"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--append", action="store_true", help="keep records of other models")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/step-time.json"))
    parser.add_argument("--smallest", action="store_true", help="tiny steps on the CPU")
    options = parser.parse_args()
    options.product, options.seconds = 8192, 2.0
    if options.smallest:
        options.device, options.product, options.seconds = "cpu", 256, 0.0
        options.batch_sizes, options.micro_batch_size = [16, 64], 8
    options.kept = options.kept or [0] * len(options.batch_sizes)
    if options.model_config:
        open_clip.add_model_config(options.model_config)
    return options


if __name__ == "__main__":
    main()
