"""The memory of each phase of a step, whether it fits, and a suggestion if it does not."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import nn

from megabatch.config.settings import TrainConfig, activation_bytes, unmeasured_micro_batch
from megabatch.errors import UsageError
from megabatch.hints import is_reference
from megabatch.models import Towers
from megabatch.models.blocks import blocks, checkpoint_activations
from megabatch.models.locking import locked_towers
from megabatch.planning.compiled import CompiledBlocks
from megabatch.planning.lengths import TextLengths
from megabatch.planning.loss import loss_bytes, loss_seconds
from megabatch.planning.machine import Machine
from megabatch.planning.micro_batches import Encoders, MicroBatches
from megabatch.planning.state import state_bytes
from megabatch.planning.towers import AUTOCAST, Sample, sample_of
from megabatch.torch_internals import is_batch_norm

#: Bytes of Python objects per image file.
_FILE_OVERHEAD = 500
#: Micro-batches of decoded images in memory: in workers, in transit, being collated, pinned.
_DECODED = 5
#: The note of a plan with compiled towers that count as they are.
COMPILED = "activations are those of towers that are not compiled: at most what compiled ones take"
#: The note of a plan with trimmed texts.
TRIMMED = "texts count with all of their tokens: at most what trimmed ones take"
#: The notes of a plan with a number of tokens.
TOKENS, PADDED = "texts count with {} tokens", "texts count with all of their tokens: none is cut"
#: The note of a plan with texts of various lengths.
SORTED = "texts in order of length are cut to {} tokens on average, the longest to {}"
#: The note of a plan with a loss of the user's own.
OWN_LOSS = "the memory of {} is unknown and not counted, except for the features' gradients"
#: Phases of a step, in order.
PHASES = ("encode", "loss", "second pass", "update")


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
        seconds: time of the loss per step, if known.
        notes: remarks for the user.
        problem: the reason why it does not fit, with a suggestion; "" if it fits.
    """

    config: TrainConfig
    machine: Machine
    parts: tuple[Part, ...]
    host: tuple[Part, ...]
    seconds: float | None = None
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


def make_plan(
    config: TrainConfig,
    towers: Towers,
    machine: Machine,
    *,
    file_bytes: float | None = None,
    text_tokens: int | None = None,
    lengths: TextLengths | None = None,
) -> Plan:
    """Estimate a run's memory, whether it fits, and if not, settings that would.

    Nothing is computed or allocated, whatever the sizes; it takes a second or two.

    Args:
        config: the run's settings.
        towers: its model.
        machine: its devices.
        file_bytes: mean size of an image file if images are decoded late; else None.
        text_tokens: tokens of each micro-batch's longest text, if texts are trimmed.
        lengths: of a sample of texts instead, if they are trimmed. Without either of the two, texts
            have all tokens that the model takes.

    Raises:
        NoPlan: the model's memory cannot be estimated.
    """
    if text_tokens is not None:
        lengths = TextLengths({tower: (text_tokens,) for tower in towers.lengths})
    planner = _Planner(config, towers, machine, file_bytes, lengths)
    plan = planner.auto_plan() if config.micro_batch_size == "auto" else planner.plan(config)
    return plan if plan.fits else replace(plan, problem=planner.advice(plan))


def graph_bytes(config: TrainConfig, towers: Towers, device: str) -> int:
    """Bytes of a micro-batch's graph beside another one, counted as for a plan.

    Raises:
        NoPlan: the model's memory cannot be estimated.
    """
    planner = _Planner(config, towers, Machine(device, 1, 0))
    size = min(unmeasured_micro_batch(config), config.global_batch_size)
    return planner.micro_batches(config, size, size).largest.further


@dataclass
class _Planner:
    config: TrainConfig
    towers: Towers
    machine: Machine
    file_bytes: float | None = None
    lengths: TextLengths | None = None

    @cached_property
    def sample(self) -> Sample:
        return replace(sample_of(self.towers), texts=1 + self.config.hard_negatives)

    @property
    def compiled(self) -> bool:
        """Whether the towers are compiled."""
        on_gpu = self.machine.device == "cuda"
        return on_gpu if self.config.torchcompile is None else self.config.torchcompile

    @cached_property
    def encoders(self) -> Encoders:
        config, module = self.config, self.towers.module
        cut = frozenset(self.towers.lengths) if config.trim_texts and self.lengths else frozenset()
        # Compiled blocks with checkpoints are divided in another way.
        compiled = CompiledBlocks() if self.compiled and not config.grad_checkpointing else None
        return Encoders(
            *(module, self.sample, self.machine.device, config.precision),
            self.lengths or TextLengths(),
            cut,
            compiled,
            lambda: _checkpointed(module, config.grad_checkpointing),
        )

    def micro_batches(
        self, config: TrainConfig, rows: int, size: int, between: tuple[int, int] | None = None
    ) -> MicroBatches:
        try:
            return self.encoders.micro_batches(rows, size, between)
        except Exception as error:  # of any type, depending on the model's operations
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            raise NoPlan(f"{config.model} cannot be planned: {reason}") from error

    def plan(
        self,
        config: TrainConfig,
        machine: Machine | None = None,
        between: tuple[int, int] | None = None,
    ) -> Plan:
        """The plan of a configuration that differs from the planner's in sizes only.

        `between`: sizes of micro-batches to interpolate, instead of counting the configuration's.
        """
        machine = machine or self.machine
        rows = -(-config.global_batch_size // machine.count)
        size = min(unmeasured_micro_batch(config), rows)
        on_gpu = machine.device == "cuda"
        parts = [*self._state(machine), *self._features(config, machine, rows)]
        micro = self.micro_batches(config, rows, size, between)
        kept = f"{_mega(micro.largest.kept)} in the graph of {size:,} pairs"
        parts.append(Part("activations", micro.passes(), kept))
        if on_gpu:
            parts.append(_inputs_on_gpu(size * self.sample.nbytes, micro.once))
        own_loss = (OWN_LOSS.format(config.loss),) * is_reference(config.loss)
        notes = self._compiled_note() + self._texts_note(micro) + own_loss
        plan = Plan(config, machine, tuple(parts), (), self._seconds(config, machine), notes)
        if on_gpu and plan.total("second pass") > machine.limit:
            plan = self._gradients_to_host(plan)
        return self._with_kept(self._with_host(plan, rows), micro)

    def _compiled_note(self) -> tuple[str, ...]:
        counted = self.encoders.compiled
        return (COMPILED,) * (self.compiled and (counted is None or counted.failed))

    def _texts_note(self, micro: MicroBatches) -> tuple[str, ...]:
        trimmed = self.config.trim_texts and bool(self.towers.lengths)
        if self.lengths is None:
            return (TRIMMED,) * trimmed
        if not trimmed:
            return (PADDED,)
        widths = [width for found in micro.widths.values() for width in found]
        if min(widths) == max(widths):
            return (TOKENS.format(widths[0]),)
        return (SORTED.format(round(statistics.fmean(widths)), max(widths)),)

    def _with_kept(self, plan: Plan, micro: MicroBatches) -> Plan:
        """Add the activations that wait for the second pass."""
        machine, room = plan.machine, None
        if machine.device == "cuda":  # the second pass has one of the graphs already
            encode, loss, second = map(plan.total, PHASES[:3])
            room = machine.limit - max(encode, loss, second - micro.typical_graph())
        bound = activation_bytes(plan.config, machine.device)
        count = micro.kept(machine.count, bound, room)
        if not count:
            return plan
        note = f"{count} of {len(micro.all)} micro-batches are encoded once"
        part = Part("kept activations", micro.beside(count), note)
        return replace(plan, parts=(*plan.parts, part))

    def _state(self, machine: Machine) -> list[Part]:
        config = self.config
        state = state_bytes(self.towers.module, config, machine.count)
        always = dict.fromkeys(PHASES, 1)
        buckets = config.parallel == "ddp" and machine.count > 1
        gradients = dict.fromkeys(PHASES if buckets else ("second pass", "update"), 1)
        at_work = dict.fromkeys(PHASES[:3], 1)
        rows = [
            ("weights", state.weights, always, ""),
            ("weights, whole", state.whole_weights, at_work, "FSDP2, while a step runs"),
            ("gradients", state.gradients, gradients, "in DDP's buckets" if buckets else ""),
            ("gradients, whole", state.whole_gradients, {"second pass": 1}, "FSDP2"),
            ("optimizer state", state.optimizer, always, config.opt),
            ("moving average", state.average, always, ""),
            ("optimizer's step", state.update, {"update": 1}, ""),
        ]
        return [
            Part(name, {phase: size for phase in phases}, note)
            for name, size, phases, note in rows
            if size
        ]

    def _features(self, config: TrainConfig, machine: Machine, rows: int) -> list[Part]:
        width = self.towers.embed_dim
        dtype = self.feature_dtype(config)
        locked = locked_towers(self.towers.module)
        one = rows * width * dtype.itemsize
        sides = 2 + config.hard_negatives
        live = (sides - len(locked)) * one
        devices = machine.device, machine.count, locked, machine.hosts
        loss = loss_bytes(config, rows, width, dtype, *devices)
        kind = str(dtype).removeprefix("torch.")
        name = "loss and its gradients"
        if is_reference(config.loss):
            name = "gradients of the loss"
        # At the end of the first pass micro-batches are concatenated: both copies exist.
        return [
            Part(
                "features",
                {"encode": 2 * sides * one, "loss": sides * one},
                f"{rows:,} x {width} x {sides}, {kind}",
            ),
            Part(name, {"loss": loss}, config.loss),
            Part("feature gradients", {"second pass": live}),
        ]

    def feature_dtype(self, config: TrainConfig) -> torch.dtype:
        """The dtype in which GradientCache keeps features."""
        if config.precision in AUTOCAST and not config.matryoshka_dims:
            return AUTOCAST[config.precision]
        return self.micro_batches(config, 2, 2).largest.feature_dtype

    def _seconds(self, config: TrainConfig, machine: Machine) -> float | None:
        return loss_seconds(config, self.towers.embed_dim, machine.name, machine.count)

    def _gradients_to_host(self, plan: Plan) -> Plan:
        """Move feature gradients to the host, as GradientCache does if memory is short."""
        parts = tuple(
            replace(part, nbytes={"second pass": 0}, note="on the host, as room is short")
            if part.name == "feature gradients"
            else part
            for part in plan.parts
        )
        return replace(plan, parts=parts)

    def _with_host(self, plan: Plan, rows: int) -> Plan:
        """Add raw inputs: to the host's parts, or on the CPU to the device's."""
        parts = list(self._inputs(plan.config, rows))
        if plan.machine.device == "cpu":
            return replace(plan, parts=(*plan.parts, *parts))
        on_host = {part.name: part.nbytes[PHASES[0]] * plan.machine.per_host for part in parts}
        return replace(
            plan, host=tuple(replace(part, nbytes={"step": on_host[part.name]}) for part in parts)
        )

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

    # --- --micro-batch-size auto ------------------------------------------------------------

    def auto_plan(self) -> Plan:
        """The plan with the size of a run that measures none, or with the next one that fits.

        On a GPU a run may choose a larger one: a note has the largest.
        """
        rows = -(-self.config.global_batch_size // self.machine.count)
        size = min(unmeasured_micro_batch(self.config), rows)
        plan = self.plan(replace(self.config, micro_batch_size=size))
        if self.machine.device == "cpu" or any(map(is_batch_norm, self.towers.module.modules())):
            return plan
        if plan.peak > self.machine.limit:
            size = 1 << self._largest_micro_batch(self.config, size).bit_length() >> 1 or 1
            plan = self.plan(replace(self.config, micro_batch_size=size))
        largest = self._largest_measured(size, rows) if plan.fits else size
        counted = f"--micro-batch-size auto: counted with {size:,} pairs at a time"
        if largest > size:
            counted += f"; a run takes the fastest of the sizes that fit, up to {largest:,}"
        return replace(plan, notes=(counted, *plan.notes))

    def _largest_measured(self, size: int, rows: int) -> int:
        """The largest size that fits: `size`, doubled some times, or all `rows`."""
        if size == rows:
            return size
        between = size, min(2 * size, rows)
        fitting = size
        for value in [*_doubled(2 * size, rows), rows]:
            larger = replace(self.config, micro_batch_size=value)
            if not self.plan(larger, between=between).fits:
                break
            fitting = value
        return fitting

    # --- suggestions ------------------------------------------------------------------------

    def advice(self, plan: Plan) -> str:
        """What is too large, and settings that would fit."""
        config, machine = plan.config, plan.machine
        if machine.host is not None and plan.host_total > machine.host:
            what = f"{_giga(plan.host_total)} of the host's {_giga(machine.host)}"
            if self.file_bytes is None and self.towers.first == "image":
                what += " (--decode late would keep image files there instead of pixels)"
        else:
            worst = max(PHASES, key=plan.total)
            what = f"{_giga(plan.peak)} of {_giga(machine.limit)} in the phase {worst!r}"
        return f"does not fit: it needs {what}; {self._suggestion(config)}"

    def _suggestion(self, config: TrainConfig) -> str:
        rows = -(-config.global_batch_size // self.machine.count)
        size = self._largest_micro_batch(config, min(unmeasured_micro_batch(config), rows))
        if size:
            return f"--micro-batch-size {size} fits"
        config = replace(config, micro_batch_size=1)
        size = self._largest_batch(config)
        if not size:
            more = "" if config.grad_checkpointing else ", --grad-checkpointing"
            return f"no batch fits: a smaller model{more} or --parallel fsdp on more GPUs would"
        smaller = f"--global-batch-size {size} does, with a small --micro-batch-size"
        count = self._enough(config)
        return f"no micro-batch size fits; {smaller}" + (f"; so do {count} GPUs" if count else "")

    def _largest_micro_batch(self, config: TrainConfig, size: int) -> int:
        """The largest micro-batch below `size` that fits; 0 if none does.

        A micro-batch's memory is counted at two sizes and interpolated linearly, which is accurate
        except for small ones; the answer is counted again.
        """
        half = max(1, size // 2)
        if half == size:
            return 0

        def fits(value: int) -> bool:
            smaller = replace(config, micro_batch_size=value)
            return self.plan(smaller, between=(half, size)).fits

        found = _bisect(fits, size)
        while found and not self.plan(replace(config, micro_batch_size=found)).fits:
            found = found * 7 // 8
        return found

    def _largest_batch(self, config: TrainConfig) -> int:
        """The largest global batch below the configuration's that fits; 0 if none does."""

        def fits(value: int) -> bool:
            return self.plan(replace(config, global_batch_size=value)).fits

        return _bisect(fits, config.global_batch_size)

    def _enough(self, config: TrainConfig) -> int:
        """The number of devices that would suffice, up to 64 times as many; 0 if these do not."""
        for factor in (2, 4, 8, 16, 32, 64):
            machine = replace(self.machine, count=self.machine.count * factor)
            if self.plan(config, machine).fits:
                return machine.count
        return 0


def _doubled(size: int, below: int) -> Iterator[int]:
    """A size, doubled again and again, as long as it is below a bound."""
    while size < below:
        yield size
        size *= 2


def _bisect(fits: Callable[[int], bool], above: int) -> int:
    """The largest number below `above` that fits, to 3%, as a round number; 0 if none does."""
    low, high = 0, above
    while high - low > max(1, low // 32):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    grain = 1 << max(0, low.bit_length() - 5)  # a power of two, at most 1/16 of `low`
    return low // grain * grain


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


def _mega(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB"
