"""Training steps of real towers: this trainer and OpenCLIP's own loop, on the same pairs.

    python benchmarks/throughput.py --output benchmarks/results/throughput.json
    torchrun --nproc-per-node 4 benchmarks/throughput.py --batch-sizes 65536 \\
        --contenders megabatch --append --output benchmarks/results/throughput.json

All contenders train the same open_clip model from the same weights with AdamW and bfloat16
autocast. The pairs are on the host, as loaders leave them there: random images, as bytes for this
trainer and normalised, in pinned memory, for OpenCLIP's; and WordNet's definitions, which are as
long as captions. `openclip` is `open_clip_train.train.train_one_epoch`, with `accum_freq` if there
are several micro-batches and texts padded to 77 tokens, `openclip-compiled` the same after
`torch.compile`. `openclip-short` has texts cut as this trainer cuts its own, which OpenCLIP's
models refuse, and is compiled in blocks. `megabatch` is `Trainer.train_step` with its defaults,
compiled and with as many activations kept as fit, `megabatch-eager` not compiled. Three steps warm
up, of OpenCLIP two on a few micro-batches and a whole one; then whole steps are timed. First losses
must agree. `--append` keeps the records of an earlier call but for those of the same configuration,
so that a long plan can be measured in several calls.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import open_clip
import torch

from machinery.definitions import length_statistics
from machinery.options import setting
from machinery.parts import AFTER_LOSS, BACKWARD, Parts
from machinery.steps import Megabatch, OpenClip, make_pairs
from megabatch.benchmarking import records
from megabatch.config.settings import TrainConfig
from megabatch.training.world import World, joined

#: Settings of this trainer's contenders; those of `--set` come on top.
SETTINGS: dict[str, dict[str, Any]] = {
    "megabatch": {"torchcompile": True},
    "megabatch-eager": {"torchcompile": False},
}
CONTENDERS = (*SETTINGS, *(f"openclip{a}{b}" for b in ("", "-short") for a in ("", "-compiled")))
EAGER = ("megabatch-eager", "openclip")
#: Relative difference of first losses that bfloat16's rounding explains.
SAME_LOSS = 2e-3


@dataclass(frozen=True)
class Record:
    """One contender at one size; null where a figure was not measured."""

    contender: str
    model: str
    device: str
    n_devices: int
    dtype: str
    b: int  #: pairs of a step, of all devices
    micro_batch_size: int  #: rows that go through the towers at a time
    settings: dict[str, Any]  #: of this trainer, where they are not its defaults
    auto: bool = False  #: this trainer chose the size of micro-batches
    status: str = "ok"
    note: str = ""
    seconds: float | None = None  #: a step's, the median
    all_seconds: tuple[float, ...] = ()
    pairs_a_second: float | None = None
    warm_up_seconds: float | None = None  #: of all steps before, compilation included
    kept_micro_batches: int | None = None  #: that are encoded once
    peak_bytes: int | None = None  #: of whole steps, on the first device
    reserved_bytes: int | None = None
    first_loss: float | None = None
    loss_difference: float | None = None  #: relative to the first contender's
    parts: dict[str, float] | None = None  #: seconds of each part of one more step
    tokens: dict[str, float] = field(default_factory=dict)  #: lengths of the texts
    equal_tokens: bool = False  #: micro-batches of sorted texts had equal tokens, not rows
    news: tuple[str, ...] = ()  #: lines of this trainer about its choices and compilation
    command: str = ""
    date: str = ""

    def key(self) -> tuple[Any, ...]:
        """The configuration: a later record of the same one replaces this one."""
        names = "contender", "model", "device", "n_devices", "b", "micro_batch_size", "auto"
        return (*(getattr(self, name) for name in names), json.dumps(self.settings, sort_keys=True))


def main() -> None:
    options = arguments()
    if options.model_config:
        open_clip.add_model_config(options.model_config)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True  # as OpenCLIP's trainer sets it
    found = earlier(options.output) if options.append else []
    with joined(TrainConfig(device=options.device)) as world:
        for model in options.models:
            for size in options.batch_sizes:
                for name, micro in plan(options, size // world.size):
                    record = run(name, model, size, micro, options, world)
                    record = compared(record, found)
                    found = [other for other in found if other.key() != record.key()] + [record]
                    if world.main:
                        print(shown(record), flush=True)
                        if options.output:
                            records.write(options.output, record.command, found)


def plan(options: argparse.Namespace, share: int) -> list[tuple[str, int | None]]:
    """Contenders with their micro-batches; None: this trainer's own choice, or `--set`."""
    sizes = sorted({min(size, share) for size in options.micro_batch_sizes})
    return [
        (name, size)
        for name in options.contenders
        for size in ([None] if name in SETTINGS else sizes)
    ]


def run(
    name: str,
    model: str,
    size: int,
    micro: int | None,
    options: argparse.Namespace,
    world: World,
) -> Record:
    """Measure one contender."""
    settings = {**SETTINGS[name], **options.set} if name in SETTINGS else {}
    record = Record(
        contender=name,
        model=model,
        device=torch.cuda.get_device_name() if world.device.type == "cuda" else "cpu",
        n_devices=world.size,
        dtype="bfloat16",
        b=size,
        micro_batch_size=micro or 0,
        settings=settings,
        auto=name in SETTINGS and "micro_batch_size" not in settings,
        equal_tokens=name in SETTINGS,
        command=records.command_line(options.output or Path()),
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
    )
    torch._dynamo.reset()
    try:
        contender: Megabatch | OpenClip
        if name in SETTINGS:
            contender = Megabatch(model, size, world, settings)
        else:
            assert micro is not None
            contender = OpenClip(
                *(model, micro, world), compiled="compiled" in name, short=name.endswith("short")
            )
        return measured(contender, size, options, world, record)
    except torch.OutOfMemoryError as error:
        record = replace(record, status="out of memory", note=str(error).split(".")[0])
    finally:
        contender = None  # type: ignore[assignment]
        gc.collect()
        if world.device.type == "cuda":
            torch.cuda.empty_cache()
    return record


def measured(
    contender: Megabatch | OpenClip,
    size: int,
    options: argparse.Namespace,
    world: World,
    record: Record,
) -> Record:
    """The record with the contender's figures."""
    on_gpu, ours = world.device.type == "cuda", isinstance(contender, Megabatch)
    pairs = make_pairs(contender.towers, size, world)
    step = contender.prepare(pairs)
    if ours:
        # Before the first step it may look for a micro-batch size, and in the first two it measures
        # how many activations it can keep.
        losses, warm_up = timed(step, 3, on_gpu)
    else:
        few = contender.prepare(pairs.first(min(len(pairs.tokens), 4 * contender.micro_batch_size)))
        _, warm_up = timed(few, 2, on_gpu)
        losses, whole = timed(step, 1, on_gpu)
        warm_up += whole
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    _, seconds = timed(step, options.steps, on_gpu)
    middle = statistics.median(seconds)
    return replace(
        record,
        micro_batch_size=contender.micro_batch_size,
        seconds=middle,
        all_seconds=tuple(seconds),
        pairs_a_second=size / middle,
        warm_up_seconds=sum(warm_up),
        kept_micro_batches=contender.kept,
        peak_bytes=torch.cuda.max_memory_allocated() if on_gpu else None,
        reserved_bytes=torch.cuda.max_memory_reserved() if on_gpu else None,
        first_loss=losses[0],
        parts=split(contender, step) if ours and options.parts else None,
        tokens=length_statistics(contender.towers.lengths["text"](pairs.tokens)),
        news=tuple(contender.news) if ours else (),
    )


def timed(step: Callable[[], float], count: int, on_gpu: bool) -> tuple[list[float], list[float]]:
    """Losses and seconds of steps, each to its end on the device."""
    losses, seconds = [], []
    for _ in range(count):
        began = time.perf_counter()
        losses.append(step())
        if on_gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return losses, seconds


def split(contender: Megabatch, step: Callable[[], float]) -> dict[str, float]:
    """The parts of another step of this trainer."""
    with Parts(contender.trainer) as parts:
        step()
    seconds = parts.seconds()
    seconds[BACKWARD] = seconds.get(BACKWARD, 0.0) + seconds.pop(AFTER_LOSS)
    return seconds


def compared(record: Record, found: list[Record]) -> Record:
    """The record with its first loss compared with that of the first one of model and batch."""
    of_batch = ("model", "b", "n_devices")
    mine = [getattr(record, name) for name in of_batch]
    first = next(
        (r for r in found if r.first_loss and [getattr(r, name) for name in of_batch] == mine), None
    )
    if record.first_loss is None or first is None or first.first_loss is None:
        return record
    difference = abs(record.first_loss / first.first_loss - 1)
    record = replace(record, loss_difference=difference)
    if difference < SAME_LOSS:
        return record
    return replace(record, status="wrong", note=f"another loss than {first.contender}'s")


def shown(record: Record) -> str:
    """A record in one line."""
    head = (
        f"{record.model}, {record.b:,} pairs, {record.n_devices} x {record.device}: "
        f"{record.contender}, {record.micro_batch_size} at a time"
    )
    if record.pairs_a_second is None:
        return f"{head}: {record.status}"
    peak = "" if record.peak_bytes is None else f", {record.peak_bytes / 2**30:.1f} GiB"
    return (
        f"{head}: {record.pairs_a_second:,.0f} pairs/s{peak}, {record.kept_micro_batches} kept, "
        f"first loss {record.first_loss:.4f}, {record.status} "
        f"(warm-up {record.warm_up_seconds:.0f} s)"
    )


def earlier(output: Path | None) -> list[Record]:
    """The records of an earlier call."""
    if output is None or not output.exists():
        return []
    return [Record(**made) for made in json.loads(output.read_text())["records"]]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    gpu = torch.cuda.is_available()
    parser.add_argument("--models", nargs="+", default=["ViT-B-32"])
    parser.add_argument("--model-config", type=Path, help="one that open_clip does not bring")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[4096, 32768])
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS,
                        default=list(CONTENDERS if gpu else EAGER))  # fmt: skip
    parser.add_argument("--micro-batch-sizes", type=int, nargs="+", default=[512],
                        help="rows at a time in OpenCLIP's loop")  # fmt: skip
    parser.add_argument("--set", type=setting, nargs="+", default=[], metavar="NAME=VALUE",
                        help="settings of this trainer: activation_memory=0")  # fmt: skip
    parser.add_argument("--parts", action="store_true", help="split a step of this trainer")
    parser.add_argument("--steps", type=int, default=3, help="that are timed")
    parser.add_argument("--device", default="cuda" if gpu else "cpu")
    parser.add_argument("--append", action="store_true")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    options.set = dict(options.set)
    return options


if __name__ == "__main__":
    main()
