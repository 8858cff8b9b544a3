"""The memory of each phase of a step, and its time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import nn

from megabatch.config.settings import TrainConfig, activation_bytes, unmeasured_micro_batch
from megabatch.errors import UsageError, are, plural
from megabatch.hints import is_reference
from megabatch.models import Towers
from megabatch.models.blocks import blocks, checkpoint_activations
from megabatch.models.layers import locked_towers
from megabatch.planning.compiled import CompiledBlocks
from megabatch.planning.lengths import TextLengths
from megabatch.planning.loss import loss_bytes, loss_seconds
from megabatch.planning.machine import Machine
from megabatch.planning.micro_batches import Encoders, MicroBatches
from megabatch.planning.seconds import StepSeconds, step_seconds
from megabatch.planning.simulation.hardware import Cluster, Encoding
from megabatch.planning.simulation.schedules import not_simulated
from megabatch.planning.state import state_bytes
from megabatch.planning.towers import AUTOCAST, Sample, sample_of

#: Bytes of Python objects per image file.
_FILE_OVERHEAD = 500
#: Micro-batches of decoded images in memory: in workers, in transit, being collated, pinned.
_DECODED = 5
#: The note of a plan with compiled towers that count as they are.
COMPILED = "activations are those of towers that are not compiled: at most what compiled ones take"
#: The note of a plan with trimmed texts.
TRIMMED = "texts count with all of their tokens: at most what trimmed ones take"
#: The notes of a plan with a number of tokens.
TOKENS, PADDED = "texts count with {}", "texts count with all of their tokens: none is cut"
#: The note of a plan with texts of various lengths.
SORTED = "texts in order of length are cut to {} on average, the longest to {}"
#: The note of a plan with a loss of the user's own.
OWN_LOSS = "the memory of {} is unknown and not counted, except for the features' gradients"
#: The note of a plan for several GPUs whose loss is not simulated.
TRANSFERS = "the time leaves out the loss's transfers between GPUs: {}"
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
        step: time of a step by part, if known.
        kept: micro-batches of a step that are encoded once. micro_batches: their number.
        notes: remarks for the user.
        problem: the reason why it does not fit, with a suggestion; "" if it fits.
    """

    config: TrainConfig
    machine: Machine
    parts: tuple[Part, ...]
    host: tuple[Part, ...]
    seconds: float | None = None
    step: StepSeconds | None = None
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


def graph_bytes(config: TrainConfig, towers: Towers, device: str) -> int:
    """Bytes of a micro-batch's graph in addition to another one, counted as for a plan.

    Raises:
        NoPlan: the model's memory cannot be estimated.
    """
    planner = Planner(config, towers, Machine(device, 1, 0))
    size = min(unmeasured_micro_batch(config), config.global_batch_size)
    return planner.micro_batches(config, size, size).largest.further


@dataclass
class Planner:
    """Plans configurations of a run that differ in sizes."""

    config: TrainConfig
    towers: Towers
    machine: Machine
    file_bytes: float | None = None
    lengths: TextLengths | None = None
    cluster: Cluster | None = None
    encoding: Encoding = field(default_factory=Encoding)

    @cached_property
    def sample(self) -> Sample:
        """A pair."""
        return replace(sample_of(self.towers), texts=1 + self.config.hard_negatives)

    @property
    def compiled(self) -> bool:
        """Whether the towers are compiled."""
        on_gpu = self.machine.device == "cuda"
        return on_gpu if self.config.torchcompile is None else self.config.torchcompile

    @cached_property
    def encoders(self) -> Encoders:
        """Counts the towers' micro-batches."""
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
        """The micro-batches of a process with this many rows; see `Encoders.micro_batches`.

        Raises:
            NoPlan: the model's memory cannot be estimated.
        """
        try:
            return self.encoders.micro_batches(rows, size, between)
        except Exception as error:  # of any type, depending on the model's operations
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            raise NoPlan(f"{config.model} cannot be planned: {reason}") from error

    def plan(self, config: TrainConfig, between: tuple[int, int] | None = None) -> Plan:
        """The plan of a configuration, with its time; see `memory`."""
        plan = self.memory(config, between=between)
        rows = -(-config.global_batch_size // self.machine.count)
        size = min(unmeasured_micro_batch(config), rows)
        return self._with_seconds(plan, self.micro_batches(config, rows, size, between))

    def memory(
        self,
        config: TrainConfig,
        machine: Machine | None = None,
        between: tuple[int, int] | None = None,
    ) -> Plan:
        """The plan, without its time, of a configuration that differs from the planner's in sizes.

        `between`: sizes of micro-batches to interpolate, instead of counting the configuration's.
        """
        machine = machine or self.machine
        rows = -(-config.global_batch_size // machine.count)
        size = min(unmeasured_micro_batch(config), rows)
        on_gpu = machine.device == "cuda"
        parts = [*self._state(machine), *self._features(config, machine, rows)]
        micro = self.micro_batches(config, rows, size, between)
        kept = f"{_mega(micro.largest.kept)} in the graph of {plural(size, 'pair')}"
        parts.append(Part("activations", micro.passes(), kept))
        if on_gpu:
            parts.append(_inputs_on_gpu(size * self.sample.nbytes, micro.once))
        own_loss = (OWN_LOSS.format(config.loss),) * is_reference(config.loss)
        notes = self._compiled_note() + self._texts_note(micro) + own_loss
        plan = Plan(config, machine, tuple(parts), (), notes=notes)
        if on_gpu and plan.total("second pass") > machine.limit:
            plan = self._gradients_to_host(plan)
        return self._with_kept(self._with_host(plan, rows), micro, rows)

    def _compiled_note(self) -> tuple[str, ...]:
        counted = self.encoders.compiled
        return (COMPILED,) * (self.compiled and (counted is None or counted.failed))

    def _texts_note(self, micro: MicroBatches) -> tuple[str, ...]:
        trimmed = self.config.trim_texts and bool(self.towers.lengths)
        if self.lengths is None:
            return (TRIMMED,) * trimmed
        if not trimmed:
            return (PADDED,)
        parts = [part for found in micro.texts.values() for part in found]
        shortest, longest = (most(width for _, width, _ in parts) for most in (min, max))
        if shortest == longest:
            return (TOKENS.format(plural(longest, "token")),)
        tokens = sum(n * width * number for n, width, number in parts)
        mean = tokens / sum(n * number for n, _, number in parts)
        return (SORTED.format(plural(round(mean), "token"), longest),)

    def _with_kept(self, plan: Plan, micro: MicroBatches, rows: int) -> Plan:
        """Add the activations that are kept for the second pass."""
        machine, room = plan.machine, None
        if machine.device == "cuda":  # the second pass has one of the graphs already
            encode, loss, second = map(plan.total, PHASES[:3])
            room = machine.limit - max(encode, loss, second - micro.typical_graph())
            room = int(room / self._longer_texts(micro, rows))
        bound = activation_bytes(plan.config, machine.device)
        count, of = micro.kept(machine.count, bound, room), micro.count
        if not count:
            return replace(plan, micro_batches=of)
        note = f"{count} of {of} micro-batches {are(count)} encoded once"
        part = Part("kept activations", micro.beside(count), note)
        return replace(plan, parts=(*plan.parts, part), kept=count, micro_batches=of)

    def _longer_texts(self, micro: MicroBatches, rows: int) -> float:
        """How many times as many tokens a micro-batch of another batch may have, as for a run."""
        lengths, count = self.lengths or TextLengths(), micro.count
        return max(
            (lengths.longer(t, self.sample.context(t), rows, count) for t in micro.texts),
            default=1.0,
        )

    def _with_seconds(self, plan: Plan, micro: MicroBatches) -> Plan:
        """Add the time of the loss and of the step, if the GPUs are known."""
        if self.cluster is None:
            return plan
        width, cluster = self.towers.embed_dim, self.cluster
        step = step_seconds(
            *(plan.config, micro, plan.kept),
            width=width,
            state=state_bytes(self.towers.module, plan.config, plan.machine.count),
            cluster=cluster,
            encoding=self.encoding,
            pair_bytes=self.sample.nbytes,
            compiled=self.compiled,
        )
        loss, notes = loss_seconds(plan.config, width, cluster.gpu, cluster.gpus), plan.notes
        why = not_simulated(plan.config.loss, plan.config.hard_negatives)
        if why and step is not None and cluster.gpus > 1:
            notes += (TRANSFERS.format(why),)
        return replace(plan, seconds=loss, step=step, notes=notes)

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


def _mega(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB"
