"""The memory of each phase of a step, and its time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from megabatch.config.settings import TrainConfig, activation_bytes, unmeasured_micro_batch
from megabatch.errors import UsageError, are, plural
from megabatch.gradient_cache.state import BATCH_NORMS
from megabatch.hints import is_reference
from megabatch.models import Towers
from megabatch.models.blocks import blocks, checkpoint_activations
from megabatch.models.towers import Tower, locked_towers
from megabatch.planning.machine import Machine
from megabatch.planning.memory import loss_bytes, state_bytes
from megabatch.planning.micro_batches import (
    Encoders,
    MicroBatches,
    TextLengths,
    kept_at_most,
    kept_count,
)
from megabatch.planning.seconds import counts_transfers, step_seconds
from megabatch.planning.speeds import Speeds, speeds_of
from megabatch.planning.towers import AUTOCAST, MicroBatch, Sample, measure, sample_of

#: Bytes of Python objects per image file.
_FILE_OVERHEAD = 500
#: Micro-batches of decoded images in memory: in workers, in transit, being collated, pinned.
_DECODED = 5
#: The note of a plan with trimmed texts.
TRIMMED = "texts count with all of their tokens: at most what trimmed ones take"
#: The note of a plan with texts of known lengths.
SORTED = "texts in order of length are cut to {} on average, the longest to {}"
#: The note of a plan with a loss of the user's own.
OWN_LOSS = "the memory of {} is unknown and not counted, except for the features' gradients"
#: The note of a plan for several GPUs whose loss's transfers are not counted.
TRANSFERS = "the time leaves out the loss's transfers between GPUs: only {} are counted".format(
    "those of clip, siglip and infonce without hard negatives"
)
#: Phases of a step, in order.
PHASES = ("encode", "loss", "second pass", "update")
#: The smallest micro-batch that `Planner.search` tries, unless a process has fewer pairs.
SMALLEST = 128
#: Sizes whose times differ by a smaller share are equally fast.
GAIN = 0.02


class NoPlan(UsageError):
    """The model's operations depend on values, so its memory cannot be estimated."""

    exit_code = 1  # not a mistake in the command


@dataclass(frozen=True)
class Part:
    """A user of memory.

    nbytes: bytes by phase; 0 in others.
    """

    name: str
    nbytes: dict[str, int]
    note: str = ""


@dataclass(frozen=True)
class Plan:
    """The memory of a step on each device and host.

    Attributes:
        config, machine: the run.
        parts: on each device.
        host: on each host, where the phase does not matter.
        step: seconds of a step by part, if known; see `step_seconds`.
        kept: micro-batches of a step that are encoded once. micro_batches: their number.
        notes: remarks for the user.
        problem: the reason why it does not fit, with a suggestion; "" if it fits.
    """

    config: TrainConfig
    machine: Machine
    parts: tuple[Part, ...]
    host: tuple[Part, ...] = ()
    step: dict[str, float] | None = None
    kept: int = 0
    micro_batches: int = 1
    notes: tuple[str, ...] = ()
    problem: str = ""

    def total(self, phase: str) -> int:
        """Bytes on each device during a phase."""
        return sum(part.nbytes.get(phase, 0) for part in self.parts)

    @property
    def peak(self) -> int:
        """Peak bytes on each device."""
        return max(self.total(phase) for phase in PHASES)

    @property
    def host_total(self) -> int:
        """Bytes on each host."""
        return sum(max(part.nbytes.values()) for part in self.host)

    @property
    def fits(self) -> bool:
        """Whether both the devices' and the hosts' memory suffice."""
        free = self.machine.host
        return self.peak <= self.machine.limit and (free is None or self.host_total <= free)

    @property
    def seconds(self) -> float | None:
        """Seconds of a step, if known."""
        return None if self.step is None else sum(self.step.values())


def make_plan(
    config: TrainConfig,
    towers: Towers,
    machine: Machine,
    *,
    file_bytes: float | None = None,
    text_tokens: int | None = None,
    lengths: TextLengths | None = None,
    speeds: Speeds | None = None,
) -> Plan:
    """Estimate a run's memory and time, whether it fits, and if not, settings that would.

    Nothing is computed or allocated, whatever the sizes; it takes some seconds. For the arguments
    see `Planner`; `text_tokens` are those of all texts, instead of `lengths`.

    Raises:
        NoPlan: the model's memory cannot be estimated.
    """
    if text_tokens is not None:
        lengths = TextLengths(dict.fromkeys(towers.lengths, (text_tokens,)))
    return Planner(config, towers, machine, file_bytes, lengths, speeds).planned()


def graph_bytes(config: TrainConfig, towers: Towers, device: str) -> int:
    """Bytes of a micro-batch's graph in addition to another one, counted as for a plan.

    Raises:
        NoPlan: the model's memory cannot be estimated.
    """
    planner = Planner(config, towers, Machine(device, 1, 0))
    return planner.micro_batches(planner.usual, planner.usual).largest.further


@dataclass
class Planner:
    """Plans configurations of a run that differ in sizes.

    Attributes:
        config: the run's settings. towers: its model. machine: its devices.
        file_bytes: mean size of an image file if images are decoded late; else None.
        lengths: of a sample of texts, if they are trimmed; without it texts have all tokens that
            the model takes.
        speeds: of the GPUs; by default those of the machine's kind of GPU, if it is known.
    """

    config: TrainConfig
    towers: Towers
    machine: Machine
    file_bytes: float | None = None
    lengths: TextLengths | None = None
    speeds: Speeds | None = None
    _losses: dict[tuple[int, int, torch.dtype], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.speeds is None and self.machine.device == "cuda":
            self.speeds = speeds_of(self.machine.name)

    @cached_property
    def sample(self) -> Sample:
        """A pair."""
        return replace(sample_of(self.towers), texts=1 + self.config.hard_negatives)

    @property
    def rows(self) -> int:
        """Pairs of a process."""
        return -(-self.config.global_batch_size // self.machine.count)

    @property
    def usual(self) -> int:
        """Pairs of a micro-batch as configured."""
        return min(unmeasured_micro_batch(self.config), self.rows)

    @property
    def compiled(self) -> bool:
        """Whether the towers are compiled."""
        on_gpu = self.machine.device == "cuda"
        return on_gpu if self.config.torchcompile is None else self.config.torchcompile

    @cached_property
    def encoders(self) -> Encoders:
        """Counts the towers' micro-batches."""
        lengths = self.lengths or TextLengths()
        cut = self.towers.lengths if self.config.trim_texts and lengths.samples else ()
        both: tuple[Tower, Tower] = "image", "text"
        contexts = {t: self.sample.context(t) for t in both if t in cut}
        return Encoders(self._count, self.usual, contexts, lengths)

    def _count(self, size: int, widths: Mapping[Tower, int]) -> MicroBatch:
        config, module = self.config, self.towers.module
        sample, checkpointing = self.sample.with_widths(widths), config.grad_checkpointing
        try:
            with _checkpointed(module, checkpointing):
                micro = measure(module, sample, size, self.machine.device, config.precision)
        except Exception as error:  # of any type, depending on the model's operations
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            raise NoPlan(f"{config.model} cannot be planned: {reason}") from error
        # What checkpoints keep are inputs, which compiled blocks have as well.
        return micro.compiled() if self.compiled and not checkpointing else micro

    def micro_batches(self, rows: int, size: int) -> MicroBatches:
        """The micro-batches of a process with this many rows; see `Encoders.micro_batches`.

        Raises:
            NoPlan: the model's memory cannot be estimated.
        """
        return self.encoders.micro_batches(rows, size)

    def planned(self) -> Plan:
        """The plan of the configuration, with a suggestion if it does not fit."""
        auto = self.config.micro_batch_size == "auto"
        plan = self._auto() if auto else self.plan()
        return plan if plan.fits else replace(plan, problem=self._problem(plan))

    def plan(self, machine: Machine | None = None, **sizes: Any) -> Plan:
        """The plan on a machine of as many rows or fewer, with other `sizes` than configured."""
        machine, config = machine or self.machine, replace(self.config, **sizes)
        rows = -(-config.global_batch_size // machine.count)
        size = min(unmeasured_micro_batch(config), rows)
        on_gpu = machine.device == "cuda"
        micro = self.micro_batches(rows, size)
        features = self._features(config, machine, rows, micro.largest.feature_dtype)
        kept = f"{micro.largest.kept / 2**20:,.0f} MiB in the graph of {plural(size, 'pair')}"
        activations = Part("activations", micro.passes(), kept)
        parts = [*self._state(config, machine), *features, activations]
        inputs = [*self._inputs(config, rows)]
        if on_gpu:
            parts.append(_inputs_on_gpu(size * self.sample.nbytes, micro.count == 1))
            each = min(machine.per_host, machine.count)
            inputs = [replace(p, nbytes={"step": p.nbytes[PHASES[0]] * each}) for p in inputs]
        own_loss = (OWN_LOSS.format(config.loss),) * is_reference(config.loss)
        notes = self._texts_note(micro) + own_loss
        host = tuple(inputs) if on_gpu else ()
        plan = Plan(config, machine, (*parts, *(() if on_gpu else inputs)), host, notes=notes)
        if on_gpu and plan.total("second pass") > machine.limit:
            plan = _gradients_to_host(plan)
        return self._with_seconds(self._with_kept(plan, micro, rows), micro)

    def _texts_note(self, micro: MicroBatches) -> tuple[str, ...]:
        if not (self.config.trim_texts and self.towers.lengths):
            return ()
        parts = [part for found in micro.texts.values() for part in found]
        if not parts:
            return (TRIMMED,)
        tokens = sum(n * width * number for n, width, number in parts)
        mean = tokens / sum(n * number for n, _, number in parts)
        return (SORTED.format(plural(round(mean), "token"), max(width for _, width, _ in parts)),)

    def _with_kept(self, plan: Plan, micro: MicroBatches, rows: int) -> Plan:
        """Add the activations that are kept for the second pass."""
        machine, room = plan.machine, None
        if machine.device == "cuda":  # the second pass has one of the graphs already
            encode, loss, second = map(plan.total, PHASES[:3])
            room = machine.limit - max(encode, loss, second - micro.mean_graph)
            room = int(room / self.encoders.longer(rows, micro.count))
        bound = activation_bytes(plan.config, machine.device)
        graphs = [(one.further, number) for one, number in micro.runs]
        of = micro.count
        count = kept_count(graphs, kept_at_most(of, machine.count), bound, room)
        if not count:
            return replace(plan, micro_batches=of)
        note = f"{count} of {of} micro-batches {are(count)} encoded once"
        part = Part("kept activations", micro.beside(count), note)
        return replace(plan, parts=(*plan.parts, part), kept=count, micro_batches=of)

    def _with_seconds(self, plan: Plan, micro: MicroBatches) -> Plan:
        """Add the time of the step, if the GPUs' speeds are known."""
        if self.speeds is None:
            return plan
        step = step_seconds(
            *(plan.config, plan.machine, self.speeds, micro, plan.kept),
            width=self.towers.embed_dim,
            state=state_bytes(self.towers.module, plan.config, plan.machine.count),
            pair_bytes=self.sample.nbytes,
            compiled=self.compiled,
        )
        missing = step is not None and plan.machine.count > 1 and not counts_transfers(plan.config)
        return replace(plan, step=step, notes=plan.notes + (TRANSFERS,) * missing)

    def _state(self, config: TrainConfig, machine: Machine) -> list[Part]:
        state = state_bytes(self.towers.module, config, machine.count)
        buckets = config.parallel == "ddp" and machine.count > 1
        rows = [
            ("weights", state.weights, PHASES, ""),
            ("weights, whole", state.whole_weights, PHASES[:3], "FSDP2, while a step runs"),
            ("gradients", state.gradients, PHASES[0 if buckets else 2 :], "in DDP's buckets"),
            ("gradients, whole", state.whole_gradients, PHASES[2:3], "FSDP2"),
            ("optimizer state", state.optimizer, PHASES, config.opt),
            ("moving average", state.average, PHASES, ""),
            ("optimizer's step", state.update, PHASES[3:], ""),
        ]
        return [
            Part(name, dict.fromkeys(phases, size), note if name != "gradients" or buckets else "")
            for name, size, phases, note in rows
            if size
        ]

    def _features(
        self, config: TrainConfig, machine: Machine, rows: int, dtype: torch.dtype
    ) -> list[Part]:
        if config.precision in AUTOCAST and not config.matryoshka_dims:
            dtype = AUTOCAST[config.precision]  # as GradientCache keeps them
        width, locked = self.towers.embed_dim, locked_towers(self.towers.module)
        one, sides = rows * width * dtype.itemsize, 2 + config.hard_negatives
        devices = machine.device, machine.count, locked, machine.hosts
        key = rows, machine.count, dtype
        if key not in self._losses:  # sizes of micro-batches are tried with one
            self._losses[key] = loss_bytes(config, rows, width, dtype, *devices)
        kind = str(dtype).removeprefix("torch.")
        own = is_reference(config.loss)
        # At the end of the first pass micro-batches are concatenated: both copies exist.
        return [
            Part(
                "features",
                {"encode": 2 * sides * one, "loss": sides * one},
                f"{rows:,} x {width} x {sides}, {kind}",
            ),
            Part(
                "gradients of the loss" if own else "loss and its gradients",
                {"loss": self._losses[key]},
                config.loss,
            ),
            Part("feature gradients", {"second pass": (sides - len(locked)) * one}),
        ]

    def _inputs(self, config: TrainConfig, rows: int) -> Iterator[Part]:
        # The current batch, the next one and, with workers, the parts of the one after that.
        if self.file_bytes is None:
            size = self.sample.nbytes
            batches, words = (3, "three") if config.workers else (2, "two")
            note = f"{size:,} bytes a pair, {words} batches"
            yield Part("raw inputs", dict.fromkeys(PHASES, batches * rows * size), note)
            return
        size = round(self.file_bytes) + _FILE_OVERHEAD + self.sample.text_bytes
        note = f"{size:,} bytes a pair, three batches"
        yield Part("image files and texts", dict.fromkeys(PHASES, 3 * rows * size), note)
        decoded = min(rows, _DECODED * unmeasured_micro_batch(config)) * self.sample.first_bytes
        note = f"{_DECODED} micro-batches"
        yield Part("decoded images", dict.fromkeys(PHASES, decoded), note)

    # --- other sizes ------------------------------------------------------------------------------

    def search(self) -> list[Plan]:
        """Plans with all powers of two and with all of a process's pairs at a time.

        As many activations are kept as fit.
        """
        sizes = {self.rows, *(SMALLEST << k for k in range(64) if SMALLEST << k < self.rows)}
        return [self.plan(micro_batch_size=size) for size in sorted(sizes)]

    def largest_batch(self) -> int:
        """The largest global batch that fits with the configured micro-batches, to 3%."""
        above = 8 * self.config.global_batch_size
        while self._fits(global_batch_size=above):
            above *= 8
        return self._largest("global_batch_size", above)

    def _auto(self) -> Plan:
        """The plan with the size of a run that measures none, or with the next one that fits.

        On a GPU a run may choose a larger one: a note has the largest.
        """
        size = self.usual
        plan = self.plan(micro_batch_size=size)
        normalised = any(isinstance(m, BATCH_NORMS) for m in self.towers.module.modules())
        if self.machine.device == "cpu" or normalised:
            return plan
        if plan.peak > self.machine.limit:
            size = 1 << self._largest("micro_batch_size", size).bit_length() >> 1 or 1
            plan = self.plan(micro_batch_size=size)
        counted = f"micro-batch size auto: counted with {plural(size, 'pair')} at a time"
        fitting = [one.config.micro_batch_size for one in self.search() if one.fits]
        largest = max((found for found in fitting if isinstance(found, int)), default=0)
        if largest > size:
            counted += f"; a run takes the fastest of the sizes that fit, up to {largest:,}"
        return replace(plan, notes=(counted, *plan.notes))

    def _fits(self, machine: Machine | None = None, **sizes: Any) -> bool:
        return self.plan(machine, **sizes).fits

    def _largest(self, name: str, above: int, **sizes: Any) -> int:
        """The largest value of a size below `above` that fits, to 3%, rounded; 0 if none does."""
        low, high = 0, above
        while high - low > max(1, low // 32):
            middle = (low + high) // 2
            fits = self._fits(None, **{**sizes, name: middle})
            low, high = (middle, high) if fits else (low, middle)
        grain = 1 << max(0, low.bit_length() - 5)  # a power of two, at most 1/16 of `low`
        return low // grain * grain

    def _problem(self, plan: Plan) -> str:
        """The reason why a plan does not fit, and settings that would."""
        machine = plan.machine
        if machine.host is not None and plan.host_total > machine.host:
            what = f"{_giga(plan.host_total)} of the host's {_giga(machine.host)}"
            if self.file_bytes is None and self.towers.first == "image":
                what += " (--decode late would keep image files there instead of pixels)"
        else:
            worst = max(PHASES, key=plan.total)
            what = f"{_giga(plan.peak)} of {_giga(machine.limit)} in the phase {worst!r}"
        return f"does not fit: it needs {what}; {self._suggestion()}"

    def _suggestion(self) -> str:
        config, count = self.config, self.machine.count
        if size := self._largest("micro_batch_size", self.usual):
            return f"--micro-batch-size {size} fits"
        size = self._largest("global_batch_size", config.global_batch_size, micro_batch_size=1)
        if not size:
            more = "" if config.grad_checkpointing else ", --grad-checkpointing"
            return f"no batch fits: a smaller model{more} or --parallel fsdp on more GPUs would"
        smaller = f"--global-batch-size {size} does, with a small --micro-batch-size"
        counts = (count << k for k in range(1, 7))
        machines = (replace(self.machine, count=count) for count in counts)
        enough = (m.count for m in machines if self._fits(m, micro_batch_size=1))
        more = f"; so do {found} GPUs" if (found := next(enough, 0)) else ""
        return f"no micro-batch size fits; {smaller}{more}"


def largest_of_fastest(seconds: Mapping[int, float]) -> int:
    """The largest of the sizes that are as fast as the fastest, within `GAIN`.

    It has the fewest launches. Neither a plan nor a trial has all that a step's host has to do
    besides them.
    """
    least = min(seconds.values())
    return max(size for size, value in seconds.items() if value <= (1 + GAIN) * least)


def fastest(plans: Sequence[Plan]) -> Plan | None:
    """Of those that fit, the one to take by `largest_of_fastest`; None if none fits."""
    fitting = {unmeasured_micro_batch(plan.config): plan for plan in plans if plan.fits}
    seconds = {size: plan.seconds for size, plan in fitting.items() if plan.seconds is not None}
    return fitting[largest_of_fastest(seconds)] if seconds else None


def _gradients_to_host(plan: Plan) -> Plan:
    """Move feature gradients to the host, as GradientCache does if memory is short."""
    moved = Part("feature gradients", {"second pass": 0}, "on the host, as room is short")
    return replace(plan, parts=tuple(moved if p.name == moved.name else p for p in plan.parts))


def _inputs_on_gpu(nbytes: int, once: bool) -> Part:
    """Inputs on the GPU: the current micro-batch's and the next one's."""
    if once:
        return Part("inputs", dict.fromkeys(PHASES[:3], nbytes), "one micro-batch")
    moved = {"encode": 2 * nbytes, "second pass": 2 * nbytes}
    return Part("inputs", moved, "two micro-batches")


@contextmanager
def _checkpointed(module: nn.Module, on: bool) -> Iterator[None]:
    """The module with activation checkpointing, if `on`."""
    if not on:
        yield
        return
    checkpoint_activations(module)
    try:
        yield
    finally:
        for block in blocks(module):
            del block.forward  # restores the class's method


def _giga(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
