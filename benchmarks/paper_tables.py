"""The paper's tables: memory and time of a step by batch size, compared with OpenCLIP's loop.

    python benchmarks/paper_tables.py --budget-seconds 540   # again until nothing is left; --list
    torchrun --nproc-per-node 4 benchmarks/paper_tables.py --models ViT-L-14

Steps of ViT-L/14 and ViT-B/16 at 224 px with global batches of 32,768 pairs and more, until memory
runs out: this trainer with the batch on the host (`host`, as it trains) and on the GPU (`device`),
without kept activations; and OpenCLIP's loop with `accum_freq`, which has the batch on the GPU. On
one GPU, also the loss alone at the towers' width, of both.

Up to `--whole` pairs whole steps are timed. In larger ones the towers run on a few micro-batches of
each pass (machinery/sampled.py) and the time of the others is extrapolated: the record says so. The
rest of the step, its loss included, and its memory are those of the whole batch. OpenCLIP's loop
computes the whole loss once for each micro-batch; so it does here.

The output is written after each measurement and read at the beginning, so each call adds what is
missing. None begins that would probably end after the budget.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import open_clip
import torch
from torch import Tensor

from machinery import group, results
from machinery.inputs import Case
from machinery.parts import Parts
from machinery.sampled import Sampled
from machinery.steps import Megabatch, OpenClip, Pairs, make_pairs
from megabatch.benchmarking import records
from megabatch.config.settings import TrainConfig
from megabatch.data import Batch
from megabatch.training.trainer import Trainer
from megabatch.training.world import World, joined

CONTENDERS = ("megabatch", "openclip")
#: Micro-batches of each pass that the towers run on, where the others are extrapolated. The time of
#: OpenCLIP's loop follows from two numbers of them.
REAL, FEW = 6, 3
#: Losses of this many pairs and more are not repeated.
ONCE = 1 << 20
#: A part of a step: micro-batches that the towers do not run on.
SKIPPED = "skipped"
#: Different pairs of a batch; a larger one repeats them.
DIFFERENT = 16_384


@dataclass(frozen=True)
class Record:
    """One contender at one size; null where a figure was not measured."""

    measured: str  #: "step" or "loss"
    contender: str
    inputs: str  #: where the batch is: "host" or "device"
    model: str
    b: int  #: pairs of a step, of all devices
    n_devices: int
    micro_batch_size: int
    device: str = ""
    dtype: str = "bfloat16"
    status: str = "ok"
    note: str = ""
    extrapolated: bool = False  #: the time; memory never is
    real_micro_batches: int | None = None  #: that the towers ran on, in each pass
    parts: dict[str, float] | None = None  #: seconds of this trainer's step, before extrapolation
    seconds: float | None = None
    pairs_a_second: float | None = None
    peak_bytes: int | None = None  #: of the step, on the first device; of the loss: besides inputs
    command: str = ""
    date: str = ""

    def key(self) -> tuple[Any, ...]:
        """The configuration, by which measurements are told apart."""
        return (*self.line(), self.b)

    def line(self) -> tuple[Any, ...]:
        """The line of a table: sizes beyond one that does not fit are left out."""
        return self.measured, self.contender, self.inputs, self.model, self.n_devices


def main() -> None:
    options = arguments()
    if options.model_config:
        open_clip.add_model_config(options.model_config)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    began, longest = time.perf_counter(), 0.0
    with joined(TrainConfig(device=options.device)) as world:
        found = world.from_main(earlier(options.output) if world.main else None)
        last = Last(options, world)
        for one in missing(options, world.size, found):
            spent = world.from_main(time.perf_counter() - began)
            if options.budget_seconds and spent + longest > options.budget_seconds:
                break
            if any(r.line() == one.line() and r.status != "ok" and r.b < one.b for r in found):
                continue
            if options.list:
                print(one.key()) if world.main else None
                continue
            found.append(run(one, options, last))
            longest = max(longest, world.from_main(time.perf_counter() - began) - spent)
            if world.main:
                print(shown(found[-1]), flush=True)
                records.write(options.output, records.command_line(options.output), found)


def missing(options: argparse.Namespace, n: int, found: list[Record]) -> Iterator[Record]:
    """The measurements that the output lacks, without figures."""
    done = {record.key() for record in found}
    lines = [("step", *line) for line in (("megabatch", "host"), ("openclip", "device"))]
    lines += [("step", "megabatch", "device")]
    lines += [("loss", name, "device") for name in CONTENDERS] if n == 1 else []
    for model, line, b in itertools.product(options.models, lines, options.batch_sizes):
        one = Record(*line, model, b, n, min(options.micro_batch_size, b // n))
        if one.key() not in done and one.contender in options.contenders:
            yield one


class Last:
    """The contender of the last measurement: another size of the batch takes it once more."""

    def __init__(self, options: argparse.Namespace, world: World) -> None:
        self.world = world
        self._options = options
        self._key: tuple[Any, ...] = ()
        self._made: tuple[Megabatch | OpenClip, Pairs] | None = None

    def forget(self) -> None:
        """Free its memory."""
        self._key, self._made = (), None
        torch._dynamo.reset()
        free()

    def contender(self, one: Record) -> tuple[Megabatch | OpenClip, Pairs, bool]:
        """A measurement's contender, a rank's different pairs, and whether both are new."""
        pairs = min(one.b, DIFFERENT * self.world.size)
        key = (one.contender, one.model, one.micro_batch_size, pairs)
        if new := key != self._key:
            self.forget()
            contender: Megabatch | OpenClip
            if one.contender == "megabatch":
                settings = {"torchcompile": self._options.compile, "activation_memory": "0"}
                size = one.micro_batch_size
                contender = Megabatch(one.model, one.b, size, self.world, settings)
            else:
                contender = OpenClip(one.model, one.micro_batch_size, self.world, compiled=False)
            self._key = key
            self._made = contender, make_pairs(contender.towers, pairs, self.world)
        assert self._made is not None
        return *self._made, new


def free() -> None:
    """Return what nothing refers to any more."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def run(one: Record, options: argparse.Namespace, last: Last) -> Record:
    """The measurement with its figures; at most `out of memory`."""
    on_gpu = last.world.device.type == "cuda"
    one = replace(
        one,
        device=torch.cuda.get_device_name() if on_gpu else "cpu",
        command=records.command_line(options.output),
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
    )
    try:
        if one.measured == "loss":
            last.forget()
            return loss_alone(one, options)
        figures = (megabatch_step if one.contender == "megabatch" else openclip_step)(
            one, options, last
        )
        rate = one.b / figures["seconds"]
        peak = torch.cuda.max_memory_allocated() if on_gpu else None
        return replace(one, **figures, pairs_a_second=rate, peak_bytes=peak)
    except torch.OutOfMemoryError as error:
        last.forget()
        return replace(one, status="out of memory", note=str(error).split(".")[0])
    finally:
        free()


def megabatch_step(one: Record, options: argparse.Namespace, last: Last) -> dict[str, Any]:
    """Time and micro-batches of a step of this trainer."""
    contender, pairs, new = last.contender(one)
    assert isinstance(contender, Megabatch)
    trainer, world = contender.trainer, last.world
    if new:  # compilation, the optimizer's state
        few = min(one.b, REAL * one.micro_batch_size * world.size)
        for _ in range(2):
            trainer.train_step(whole_batch(pairs, replace(one, b=few), world))
    batch = whole_batch(pairs, one, world)
    total = -(-len(batch) // one.micro_batch_size)
    real = total if one.b <= options.whole else min(total, REAL)
    # The first step of a size compiles for its loss and for micro-batches of other numbers of
    # texts; in a step that is measured this would be extrapolated.
    parts_of_step(trainer, batch, total, real)
    if world.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    taken = parts_of_step(trainer, batch, total, real)
    passes = sum(took for name, took in taken.items() if "pass" in name)
    seconds = sum(taken.values()) + (total / real - 1) * passes
    return {
        "seconds": seconds,
        "extrapolated": real < total,
        "real_micro_batches": real,
        "parts": taken,
    }


def parts_of_step(trainer: Trainer, batch: Batch, total: int, real: int) -> dict[str, float]:
    """Seconds of a step by part, its towers on `real` of `total` micro-batches."""
    parts = Parts(trainer)

    def before() -> None:
        if real < total:
            parts.mark(SKIPPED)
            busy(trainer.device)

    skips = Sampled(
        trainer.module,
        total,
        real,
        lambda: parts.mark(SKIPPED),
        before,
        ddp=trainer.world.size > 1,
    )
    with parts, skips:  # in this order: skipped calls are no part of a tower's
        trainer.train_step(batch)
    taken = parts.seconds()
    taken.pop(SKIPPED, None)
    return taken


def busy(device: torch.device) -> None:
    """Keep a GPU busy for 0.1 s, while the host launches what follows, as in a whole step.

    After skipped micro-batches it would wait for each launch, and this time would be extrapolated.
    """
    if device.type == "cuda":
        torch.cuda._sleep(200_000_000)  # cycles


def openclip_step(one: Record, options: argparse.Namespace, last: Last) -> dict[str, Any]:
    """The same of OpenCLIP's loop."""
    contender, pairs, new = last.contender(one)
    assert isinstance(contender, OpenClip)
    world = last.world
    share = one.b // world.size
    tokens = pairs.tokens[torch.arange(share) % len(pairs.tokens)]
    if new:
        contender.prepare(pairs.first(min(len(pairs.tokens), 2 * one.micro_batch_size)))()
    step = contender.prepare(Pairs(pairs.images, tokens))
    total = share // one.micro_batch_size
    if world.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    if one.b <= options.whole or total <= REAL:
        return {"seconds": timed(step, world), "real_micro_batches": total}
    taken = []
    for real in (FEW, REAL):
        with Sampled(contender.module, total, real, ddp=world.size > 1):
            taken.append(timed(step, world))
    each = max(0.0, taken[1] - taken[0]) / (REAL - FEW)
    seconds = taken[1] + (total - REAL) * each
    return {"seconds": seconds, "extrapolated": True, "real_micro_batches": REAL}


def timed(step: Any, world: World) -> float:
    """Seconds of a step, to its end on the device."""
    began = time.perf_counter()
    step()
    if world.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


class Repeated:
    """Rows of a tensor again and again, sliced on access: a batch larger than the host's memory."""

    def __init__(self, rows: Tensor, size: int) -> None:
        self._rows = rows
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, rows: slice) -> Tensor:
        places = torch.arange(*rows.indices(self._size)) % len(self._rows)
        first = int(places[0]) if len(places) else 0
        if len(places) and int(places[-1]) - first == len(places) - 1:
            return self._rows[first : first + len(places)]
        return self._rows[places]


def whole_batch(pairs: Pairs, one: Record, world: World) -> Batch:
    """A rank's share of the batch, on the host or, as a copy of all its rows, on the device."""
    share = one.b // world.size
    rows = torch.arange(share)
    tokens = pairs.tokens[rows % len(pairs.tokens)]
    images: Any = Repeated(pairs.first(min(share, len(pairs.tokens))).bytes(), share)
    if one.inputs == "host":
        return Batch(images, tokens, rows)
    shape = (share, *pairs.images.shape[1:])
    whole = torch.empty(shape, dtype=torch.uint8, device=world.device)
    for start in range(0, share, one.micro_batch_size):
        part = images[start : start + one.micro_batch_size]
        whole[start : start + len(part)] = part.to(world.device)
    return Batch(whole, tokens.to(world.device), rows)


def loss_alone(one: Record, options: argparse.Namespace) -> Record:
    """The loss of features of the model's width, as single_gpu.py measures it."""
    width = open_clip.get_model_config(one.model)["embed_dim"]
    case = Case("clip", one.contender, options.device, "bfloat16", one.b, width, scale=14.3)
    size = 8192 if options.device == "cuda" else 64
    wanted = group.Group(
        (case,), seconds=0.5 if size > 64 else 0.01, product_size=size, once=one.b >= ONCE
    )
    done = [result for _, result in group.run(wanted, time.time() + 300) if result is not None]
    record = results.combine(case, done, work=8)
    return replace(
        one,
        status=record.status,
        note=record.note,
        seconds=None if record.ms is None else record.ms / 1e3,
        peak_bytes=record.extra_bytes,
    )


def shown(record: Record) -> str:
    """A record in one line."""
    head = f"{record.model}, {record.b:,} pairs, {record.n_devices} x {record.device}: "
    head += f"{record.contender}'s {record.measured}, batch on the {record.inputs}: "
    if record.seconds is None:
        return head + f"{record.status} {record.note}"
    how = " (extrapolated)" if record.extrapolated else ""
    peak = "" if record.peak_bytes is None else f", {record.peak_bytes / 2**30:.2f} GiB"
    return head + f"{record.seconds:.3f} s{how}{peak}, {record.status}"


def earlier(output: Path) -> list[Record]:
    """The records of earlier calls."""
    if not output.exists():
        return []
    return [Record(**made) for made in json.loads(output.read_text())["records"]]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    gpu = torch.cuda.is_available()
    sizes = [32_768 << i for i in range(8)]
    parser.add_argument("--models", nargs="+", default=["ViT-L-14", "ViT-B-16"])
    parser.add_argument("--model-config", type=Path, help="one that open_clip does not bring")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=sizes, metavar="B")
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--micro-batch-size", type=int, default=512)
    parser.add_argument("--whole", type=int, default=32_768, metavar="B",
                        help="the largest batch whose steps are timed as a whole")  # fmt: skip
    parser.add_argument("--no-compile", dest="compile", action="store_false",
                        help="of this trainer; OpenCLIP's loop is not compiled")  # fmt: skip
    parser.add_argument("--device", default="cuda" if gpu else "cpu")
    parser.add_argument("--budget-seconds", type=float, default=0.0, help="0: without limit")
    parser.add_argument("--list", action="store_true", help="print what is missing")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/paper-tables.json"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
