"""Plans compared with measured training steps: memory within 7%, time within 12%.

    python benchmarks/plan_check.py                       # all committed records, eight minutes
    python benchmarks/plan_check.py throughput.json       # those of one file

Each measured configuration of the trainer in the records is planned anew, with the texts that it
had and no other knowledge: the plan also chooses how many micro-batches are kept. The peak is the
allocator's. The time is a step's, without waiting for data. The exit code is 1 if one deviates by
more. Those that say "calibrates" are the ones from which the package's constants of the encoders
come (`megabatch.planning.machine.Speeds`); all others are predicted. Needs no GPU.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from machinery.definitions import captions, tokenized, words_and_definitions
from megabatch.config.settings import TrainConfig
from megabatch.gradient_cache.by_length import equal_rows
from megabatch.models import Towers, create
from megabatch.models.towers import Tower
from megabatch.planning.machine import datasheet, other_machine
from megabatch.planning.micro_batches import TextLengths, cut
from megabatch.planning.plan import Plan, Planner

RESULTS = Path(__file__).parent / "results"
#: The largest deviations of a plan from a measurement.
MEMORY, TIME = 0.07, 0.12
FILES = ("throughput.json", "icons.json", "icons-1m.json",
         "retriever-trainer.json", "retriever-bert-base.json", "paper-tables.json")  # fmt: skip
#: The icons' model.
ICONS = "machinery.icon_towers:icon_small"
#: Steps measured before this had OpenCLIP's own blocks.
FAST_BLOCKS = "2026-11-27T18"
#: Those before this had fast blocks with torch's GELU.
GELU_KERNELS = "2026-11-28T03"
#: Different pairs of a batch of paper-tables.json; a larger one repeats them.
DIFFERENT = 16_384


@dataclass(frozen=True)
class EqualRows(TextLengths):
    """Texts of a run that sorted them and divided them into micro-batches of equal rows.

    So did those of all records that do not say `equal_tokens`. A plan knows the mean micro-batch
    alone: for the time of all, for the memory of those that are encoded once, the last ones.

    kept: the number of micro-batches that were encoded once.
    """

    kept: int = 0
    of_memory: bool = False

    def widths(self, tower: Tower, context: int, rows: int, count: int) -> tuple[float, float]:
        """As each micro-batch's first text, the longest one."""
        sample = sorted(self.samples[tower], reverse=True)
        parts = equal_rows(rows, -(-rows // count))
        cuts = [cut(sample[part.start * len(sample) // rows], context) for part in parts]
        meant = cuts[-max(1, self.kept) :] if self.of_memory else cuts
        return sum(meant) / len(meant), cuts[0]

    def longer(self, tower: Tower, context: int, rows: int, count: int) -> float:
        """How many times as many tokens those that are kept may have in another batch, on average.

        Texts of full length are all in the first micro-batch: the run left room for one such graph.
        """
        return 1 + (context / cut(max(self.samples[tower]), context) - 1) / max(1, self.kept)


def texts_of(record: dict[str, Any], samples: dict[Tower, list[int]]) -> TextLengths:
    """The texts of a record, divided as in its run."""
    if record.get("equal_tokens"):
        return TextLengths(samples)
    return EqualRows(samples, record["kept_micro_batches"])


@dataclass(frozen=True)
class Measured:
    """A step of the trainer.

    Attributes:
        name: of the model.
        config: of the run.
        towers: its model. lengths: of its texts, if they were cut.
        gpus: their number, and `device` their name.
        seconds: of a step; NaN if it was not measured.
        peak: bytes of the allocator. before: those of them that it does not count.
        kept: micro-batches that were encoded once; None if it is not recorded.
        calibrates: whether constants of the package come from its time.
        date: of the measurement, if models of OpenCLIP had fast blocks in some.
        judged: whether its time must agree. For pairs of texts only the memory must: the plan
            tells too little time for them, 40% of a step of MiniLM's size (docs/speed.md).
    """

    name: str
    config: TrainConfig
    towers: Towers
    lengths: TextLengths | None
    gpus: int
    device: str
    seconds: float
    peak: int
    before: int = 0
    kept: int | None = None
    calibrates: bool = False
    judged: bool = True
    date: str = ""

    def plan(self) -> Plan:
        """The plan of the run."""
        sheet = datasheet(self.device)
        assert sheet is not None
        machine = other_machine(self.gpus, sheet.capacity, self.device)
        planner = Planner(self.config, self.towers, machine, lengths=self.lengths)
        if self.date < FAST_BLOCKS:
            planner._module = self.towers.module
        elif self.date < GELU_KERNELS:
            for block in planner._module.modules():
                block.fuses_gelu = False
        plan = planner.plan()
        if not isinstance(self.lengths, EqualRows):
            return plan
        planner.lengths = replace(self.lengths, of_memory=True)
        return replace(planner.plan(), step=plan.step)


def measured(file: Path) -> Iterator[Measured]:
    """The training steps of a file of records."""
    content = json.loads(file.read_text())
    if file.name == "icons-1m.json":
        yield million(content)
        return
    for record in content["records"]:
        if "measured" in record:
            if (record["measured"], record["inputs"]) == ("step", "host"):
                yield paper(record)
        elif record.get("contender") in ("megabatch", "megabatch-eager"):
            if record.get("status") == "ok" and datasheet(record["device"]):
                yield clip(record)
        elif record.get("contender") == "trainer":
            if record.get("kept_micro_batches") is not None:
                yield retriever(record)
        elif record.get("model") == "icon-small":
            yield icons(record)


@cache
def towers_of(model: str) -> Towers:
    """An OpenCLIP model or the icons'."""
    return create(model)


def clip(record: dict[str, Any]) -> Measured:
    """A record of benchmarks/throughput.py, whose first rank has the first texts."""
    towers, size = towers_of(record["model"]), record["b"]
    texts = captions(size)[: size // record["n_devices"]]
    lengths = towers.lengths["text"](tokenized(towers.tokenizer, texts))
    config = TrainConfig(
        model=record["model"],
        global_batch_size=size,
        **{**record["settings"], "micro_batch_size": record["micro_batch_size"]},
    )
    return Measured(
        *(record["model"], config, towers, texts_of(record, {"text": lengths.tolist()})),
        *(record["n_devices"], record["device"], record["seconds"], record["peak_bytes"]),
        kept=record["kept_micro_batches"],
        calibrates=record["settings"]["torchcompile"] and record["date"] > GELU_KERNELS,
        date=record["date"],
    )


def paper(record: dict[str, Any]) -> Measured:
    """A step with the batch on the host.

    Times that were extrapolated are not judged: ViT-L/14 reached 674 pairs/s by them and 637 in
    whole steps, probably since a GPU that rests between micro-batches is at higher clocks.
    """
    towers, size, n = towers_of(record["model"]), record["b"], record["n_devices"]
    texts = captions(min(size, DIFFERENT * n))[: min(size // n, DIFFERENT)]
    lengths = towers.lengths["text"](tokenized(towers.tokenizer, texts))
    config = TrainConfig(
        model=record["model"],
        global_batch_size=size,
        micro_batch_size=record["micro_batch_size"],
        torchcompile=True,
        activation_memory="0",
    )
    return Measured(
        *(record["model"], config, towers, TextLengths({"text": lengths.tolist()}), n),
        *(record["device"], record["seconds"] or math.nan, record["peak_bytes"]),
        kept=0,
        judged=record["seconds"] is not None and not record["extrapolated"],
    )


def icons(record: dict[str, Any]) -> Measured:
    """A run of the icons' model, before texts were cut and activations kept."""
    config = TrainConfig(
        model=ICONS,
        global_batch_size=record["b"],
        micro_batch_size=record["micro_batch_size"],
        torchcompile=True,
        trim_texts=False,
        activation_memory="0",
    )
    seconds, peak = record["step_ms"] / 1e3, record["memory_bytes"]
    return Measured("icon-small", config, towers_of(ICONS), None, 1, "NVIDIA H200", seconds, peak)


def million(content: dict[str, Any]) -> Measured:
    """The last of the steps over 1,048,576 icons, without its time of waiting."""
    step, size = content["steps"][-1], 1 << 20
    seconds = size / step["pairs_per_second"] * (1 - step["data_wait"])
    return icons({**step, "step_ms": 1e3 * seconds, "b": size, "micro_batch_size": 16384})


def retriever(record: dict[str, Any]) -> Measured:
    """A record of benchmarks/retriever.py, whose peak is that besides the weights."""
    from retriever import HELD_OUT, random_bert

    pairs = words_and_definitions()
    with tempfile.TemporaryDirectory() as folder:
        path = random_bert(record["model"], pairs, Path(folder) / "bert")
        towers = create(f"hf:{path}")
    texts = zip(*pairs[HELD_OUT : HELD_OUT + record["b"]], strict=True)
    lengths: dict[Tower, list[int]] = {
        tower: towers.lengths[tower](towers.tokenizer(list(side))).tolist()
        for tower, side in zip(("image", "text"), texts, strict=True)
    }
    # The library pads a batch to its longest text, not to the model's context.
    columns = {tower: max(found) for tower, found in lengths.items()}
    transform, tokenizer = towers.train_transform, towers.tokenizer
    towers = replace(
        towers,
        train_transform=lambda text: transform(text)[: columns["image"]],
        tokenizer=lambda texts: tokenizer(texts)[:, : columns["text"]],
    )
    config = TrainConfig(
        model="hf:bert",
        loss="infonce",
        global_batch_size=record["b"],
        micro_batch_size=record["mini_batch_size"],
        torchcompile=record["compiled"],
    )
    weights = sum(p.nbytes for p in towers.module.parameters())
    return Measured(
        *(record["model"], config, towers, texts_of(record, lengths), 1, "NVIDIA H200"),
        *(record["seconds"], record["extra_bytes"], weights, record["kept_micro_batches"]),
        judged=False,
    )


def compared(one: Measured) -> tuple[str, bool]:
    """A line with the plan next to the measurement, and whether both deviations are allowed."""
    plan = one.plan()
    assert plan.seconds is not None
    memory = (plan.peak - one.before) / one.peak - 1
    time = plan.seconds / one.seconds - 1
    good = abs(memory) <= MEMORY and (abs(time) <= TIME or not one.judged)
    config = one.config
    kept = "?" if one.kept is None else one.kept
    took = "no time" if math.isnan(time) else f"{one.seconds:7.3f} s {time:+6.1%}"
    use = "calibrates" if one.calibrates else "predicted" if one.judged else "memory alone"
    line = (
        f"{one.name:10} {config.global_batch_size:>9,} pairs on {one.gpus}, "
        f"{config.micro_batch_size:>6,} at a time{'' if config.torchcompile else ', eager'}: "
        f"{one.peak / 2**30:6.1f} GiB {memory:+6.1%}, {took}, "
        f"kept {kept} (plan {plan.kept}), {use}"
        f"{'' if good else '  BEYOND'}"
    )
    return line, good


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "files", nargs="*", default=FILES, help="below benchmarks/results, or paths"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    paths = [Path(name) if Path(name).exists() else RESULTS / name for name in options.files]
    found, beyond = [], 0
    for one in (one for path in paths for one in measured(path)):
        line, good = compared(one)
        print(line, flush=True)
        found.append(one)
        beyond += not good
    kinds = {(one.name, one.gpus, one.config) for one in found}
    print(
        f"{len(found)} steps of {len(kinds)} configurations, {len({one.name for one in found})} "
        f"models on "
        f"{', '.join(map(str, sorted({one.gpus for one in found})))} GPUs; "
        f"{sum(one.calibrates for one in found)} calibrate; {beyond} beyond "
        f"{MEMORY:.0%} of memory or {TIME:.0%} of time"
    )
    sys.exit(1 if beyond or not found else 0)


if __name__ == "__main__":
    main()
