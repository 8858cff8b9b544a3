"""A run's memory in each phase of a step, and its time, from its settings."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import nn

from megabatch.config.settings import (
    TrainConfig,
    activation_bytes,
    unmeasured_micro_batch,
    with_precision,
)
from megabatch.errors import UsageError, plural
from megabatch.gradient_cache.outputs import LARGE
from megabatch.gradient_cache.state import BATCH_NORMS
from megabatch.models import Towers
from megabatch.models.blocks import blocks, checkpoint_activations, with_fast_blocks
from megabatch.models.towers import Tower, locked_towers
from megabatch.options import is_reference
from megabatch.planning.machine import DATASHEETS, Machine
from megabatch.planning.memory import AUTOCAST, loss_bytes, state_bytes
from megabatch.planning.micro_batches import WHOLE, MicroBatches, TextLengths, weighted
from megabatch.planning.seconds import step_seconds
from megabatch.planning.towers import MicroBatch, Sample, measure, sample_of

#: Bytes of Python objects per image file.
_FILE_OVERHEAD = 500
#: Micro-batches of decoded images in memory: in workers, in transit, being collated, pinned.
_DECODED = 5
#: Phases of a step, in order; the optimizer's step needs less.
PHASES = ("encode", "loss", "second pass")
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
        host: on each host of GPUs.
        step: seconds of a step by part, if known; see `step_seconds`.
        kept: micro-batches of a step that are encoded once.
        notes: remarks for the user.
        problem: the reason why it does not fit, with a suggestion; "" if it fits.
        largest_batch: about the most pairs of a step that fit a GPU, if this plan does.
    """

    config: TrainConfig
    machine: Machine
    parts: tuple[Part, ...]
    host: tuple[Part, ...] = ()
    step: dict[str, float] | None = None
    kept: int = 0
    notes: tuple[str, ...] = ()
    problem: str = ""
    largest_batch: int | None = None

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
        return sum(part.nbytes[PHASES[0]] for part in self.host)

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
    lengths: TextLengths = WHOLE,
) -> Plan:
    """Estimate a run's memory and time, whether it fits, and if not, settings that would.

    Nothing is computed or allocated, whatever the sizes; it takes some seconds. For the arguments
    see `Planner`.

    Raises:
        NoPlan: the model's memory cannot be estimated.
    """
    if towers.multi_vector:
        raise NoPlan(
            f"--loss {config.loss} cannot be planned: the memory of tokens' features and of their "
            "loss depends on the longest texts of each batch"
        )
    if config.micro_batch_tokens is not None:
        raise NoPlan(
            f"--micro-batch-tokens {config.micro_batch_tokens} cannot be planned: plans divide "
            "batches by --micro-batch-size"
        )
    if hasattr(towers.train_transform, "collate"):
        raise NoPlan(
            f"{config.model} cannot be planned: its memory depends on the lengths of its images"
        )
    return Planner(config, towers, machine, file_bytes, lengths).planned()


@dataclass
class Planner:
    """Plans configurations of a run that differ in sizes.

    Attributes:
        config: the run's settings. towers: its model. machine: its devices.
        file_bytes: mean size of an image file if images are decoded late; else None.
        lengths: of a sample of texts, if they are trimmed; without it texts have all tokens that
            the model takes.
    """

    config: TrainConfig
    towers: Towers
    machine: Machine
    file_bytes: float | None = None
    lengths: TextLengths = WHOLE

    def __post_init__(self) -> None:
        self.config = with_precision(self.config, self.machine.device)
        if self.config.torchcompile is None:  # as a run chooses
            self.config = replace(self.config, torchcompile=self.machine.device == "cuda")
        self._counted = functools.cache(self._count)

    @cached_property
    def sample(self) -> Sample:
        """A pair."""
        return sample_of(self.towers, 1 + self.config.hard_negatives)

    @cached_property
    def _module(self) -> nn.Module:
        """The model as a step runs it."""
        module, compiled = self.towers.module, self.config.torchcompile
        if not compiled:
            return module
        return with_fast_blocks(module, kernels=self.machine.device == "cuda")

    @property
    def usual(self) -> int:
        """Pairs of a micro-batch as configured, or without a measurement."""
        return min(unmeasured_micro_batch(self.config), self._rows(self.config))

    def _rows(self, config: TrainConfig) -> int:
        """Pairs of a process."""
        return -(-config.global_batch_size // self.machine.count)

    def planned(self) -> Plan:
        """The plan of the configuration, with a suggestion if it does not fit."""
        plan = self._auto() if self.config.micro_batch_size == "auto" else self.plan()
        if not plan.fits:
            return replace(plan, problem=self._problem(plan))
        if self.machine.device == "cpu":
            return plan
        size = plan.config.micro_batch_size
        return replace(plan, largest_batch=self.largest_batch(micro_batch_size=size))

    def plan(self, **sizes: Any) -> Plan:
        """The plan with other `sizes` than configured.

        Raises:
            NoPlan: the model's memory cannot be estimated.
        """
        config, machine = replace(self.config, **sizes), self.machine
        rows = self._rows(config)
        size = min(unmeasured_micro_batch(config), rows)
        micro, inputs = self.micro_batches(rows, size), size * self.sample.nbytes
        parts = [*self._state(), *self._features(config, rows)]
        host = [*self._inputs(config, rows)]
        if machine.device == "cpu":
            parts, host = [*parts, *host], []
        elif micro.count == 1:
            parts.append(Part("inputs", dict.fromkeys(PHASES, inputs), "one micro-batch"))
        else:
            moved = {"encode": 2 * inputs, "second pass": 2 * inputs}
            parts.append(Part("inputs", moved, "two micro-batches"))
        kept = self._kept(config, rows, micro, parts)
        note = f"{micro.largest.kept / 2**20:,.0f} MiB for {plural(size, 'pair')}"
        if kept:
            are = "is" if kept == 1 else "are"
            note += f"; {kept:,} of {micro.count:,} micro-batches {are} encoded once"
        parts.append(Part("activations", micro.nbytes(kept), note))
        step = step_seconds(config, machine, micro, kept, self.towers.embed_dim)
        notes = self._notes(config, micro.tokens)
        return Plan(config, machine, tuple(parts), tuple(host), step, kept, notes)

    # --- activations ------------------------------------------------------------------------------

    @cached_property
    def _contexts(self) -> dict[Tower, int]:
        """Tokens that the model takes, of the towers whose texts are cut to known lengths."""
        known = self.config.trim_texts and self.lengths.samples
        return {t: len(self.sample.inputs[t]) for t in self.towers.lengths} if known else {}

    def micro_batches(self, rows: int, size: int) -> MicroBatches:
        """The micro-batches of a process with this many rows.

        Raises:
            NoPlan: the model's memory cannot be estimated.
        """
        count, known = -(-rows // size), self.lengths
        widths = [known.widths(tower, n, rows, count) for tower, n in self._contexts.items()]
        means, most = ([pair[i] for pair in widths] for i in range(2))
        tokens = sum(means) / max(1, len(means))
        mean, largest = self._micro_batch(size, means), self._micro_batch(size, most)
        return MicroBatches(mean, largest, count, tokens)

    def _micro_batch(self, size: int, widths: Sequence[float]) -> MicroBatch:
        """A micro-batch of `size` pairs with texts of so many tokens, by tower of `_contexts`.

        Bytes and work are linear functions of the pairs and of the tokens of each tower, from a few
        that are counted, which is accurate but for small sizes. (Where texts are shorter than
        attention's tiles, its work depends on their number alone.)
        """
        ranges = [self.lengths.range(tower, most) for tower, most in self._contexts.items()]
        least = [shortest for shortest, _ in ranges]
        points = [(self.usual, *least)]
        for i, (shortest, longest) in enumerate(ranges):
            if longest > shortest:
                points.append((self.usual, *least[:i], longest, *least[i + 1 :]))
        if size != self.usual > 1:
            points.append((self.usual // 2, *least))
        terms = np.array([[1, n, *(n * width for width in others)] for n, *others in points], float)
        wanted = np.array([1, size, *(size * width for width in widths)], float)
        shares = np.linalg.lstsq(terms.T, wanted, rcond=None)[0]
        return weighted([self._counted(*point) for point in points], shares.tolist())

    def _count(self, size: int, *widths: int) -> MicroBatch:
        config, module = self.config, self._module
        sample = self.sample.cut(dict(zip(self._contexts, widths, strict=True)))
        checkpointing = config.grad_checkpointing
        try:
            with ExitStack() as stack:
                if checkpointing:
                    checkpoint_activations(module)
                    for block in blocks(module):  # restores the class's method
                        stack.callback(delattr, block, "forward")
                micro = measure(module, sample, size, self.machine.device, config.precision)
        except Exception as error:  # of any type, depending on the model's operations
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            raise NoPlan(f"{config.model} cannot be planned: {reason}") from error
        if checkpointing or not config.torchcompile:
            return micro  # what checkpoints keep are inputs, which compiled blocks have as well
        return micro.compiled(any(getattr(b, "fuses_gelu", False) for b in blocks(module)))

    def _kept(
        self, config: TrainConfig, rows: int, micro: MicroBatches, others: Sequence[Part]
    ) -> int:
        """The number of micro-batches whose activations are kept for the second pass."""
        machine, count, graph = self.machine, micro.count, max(1, micro.mean.further)
        if count == 1:
            return 0
        # On several ranks the micro-batch that synchronises gradients is always encoded again.
        limits = [count - (machine.count > 1)]
        if (bound := activation_bytes(config, machine.device)) is not None:
            limits.append(bound // graph)
        if machine.device == "cuda":
            parts = [*others, Part("activations", micro.nbytes(0))]
            encode, loss, second = (sum(p.nbytes.get(name, 0) for p in parts) for name in PHASES)
            longer = (self.lengths.longer(t, n, rows, count) for t, n in self._contexts.items())
            # The second pass has one of the graphs already.
            free = machine.limit - max(encode, loss, second - graph)
            limits.append(int(free / max([1.0, *longer]) / graph))
        return max(0, min(limits))

    # --- the rest of a step -----------------------------------------------------------------------

    def _state(self) -> list[Part]:
        config, count = self.config, self.machine.count
        state = state_bytes(self.towers.module, config, count)
        buckets = config.parallel == "ddp" and count > 1
        while_used = (PHASES, "in DDP's buckets") if buckets else (PHASES[2:], "")
        rows = [
            ("weights", state.weights, PHASES, ""),
            ("weights, whole", state.whole_weights, PHASES, "FSDP2, while a step runs"),
            ("gradients", state.gradients, *while_used),
            ("gradients, whole", state.whole_gradients, PHASES[2:], "FSDP2"),
            ("optimizer state", state.optimizer, PHASES, config.opt),
            ("moving average", state.average, PHASES, ""),
        ]
        return [
            Part(n, dict.fromkeys(phases, size), note) for n, size, phases, note in rows if size
        ]

    def _features(self, config: TrainConfig, rows: int) -> list[Part]:
        # As GradientCache keeps them; for prefixes, as a GPU normalises them under autocast.
        precision = "fp32" if config.matryoshka_dims else config.precision
        dtype = AUTOCAST.get(precision, torch.float32)
        machine, width = self.machine, self.towers.embed_dim
        locked = locked_towers(self.towers.module)
        loss = loss_bytes(config, rows, width, dtype, machine.device, machine.count, locked)
        one, sides = rows * width * dtype.itemsize, 2 + config.hard_negatives
        on_host = machine.device == "cuda" and one >= LARGE
        waiting = 0 if on_host else (sides - len(locked)) * one
        note = f"{rows:,} x {width} x {sides}, {str(dtype).removeprefix('torch.')}"
        name = "gradients of the loss" if is_reference(config.loss) else "loss and its gradients"
        # At the end of the first pass micro-batches are concatenated: both copies exist.
        return [
            Part("features", {"encode": 2 * sides * one, "loss": sides * one}, note),
            Part(name, {"loss": loss}, config.loss),
            Part("feature gradients", {"second pass": waiting}, "on the host" * on_host),
        ]

    def _inputs(self, config: TrainConfig, rows: int) -> Iterator[Part]:
        """Bytes of inputs on a host, or on the CPU in a process."""
        # The current batch, the next one and, with workers, the parts of the one after that.
        machine, batches = self.machine, 3 if config.workers or self.file_bytes is not None else 2
        each = min(machine.per_host, machine.count) if machine.device == "cuda" else 1
        size, name = self.sample.nbytes, "raw inputs"
        if self.file_bytes is not None:
            size, name = round(self.file_bytes) + _FILE_OVERHEAD, "image files and texts"
            size += self.sample.bytes_of("text")
            decoded = min(rows, _DECODED * unmeasured_micro_batch(config)) * each
            decoded *= self.sample.bytes_of("image")
            yield Part(
                "decoded images", dict.fromkeys(PHASES, decoded), f"{_DECODED} micro-batches"
            )
        note = f"{size:,} bytes a pair, {batches} batches"
        yield Part(name, dict.fromkeys(PHASES, batches * rows * size * each), note)

    def _notes(self, config: TrainConfig, tokens: float) -> tuple[str, ...]:
        machine = self.machine
        notes = ["products in float8 count as those in bfloat16"] * (config.precision == "fp8")
        if tokens:
            cut = plural(round(tokens), "token")
            notes.append(f"texts in order of length are cut to {cut} on average")
        elif config.trim_texts and self.towers.lengths:
            notes.append("texts count with all of their tokens: at most what trimmed ones take")
        if machine.device == "cuda" and machine.speeds is None:
            known = f"the time of a step is not known on {machine.name or 'this GPU'}, only on "
            notes.append(known + ", ".join(DATASHEETS))
        return tuple(notes)

    # --- other sizes ------------------------------------------------------------------------------

    def _auto(self) -> Plan:
        """The plan with the micro-batch size that a run would find, by the planned times.

        Of the sizes up to all of a process's pairs, as far as they fit, it is the fastest; if none
        fits, a smaller one that does.
        """
        usual, rows = self.usual, self._rows(self.config)
        normalised = any(isinstance(m, BATCH_NORMS) for m in self.towers.module.modules())
        if self.machine.device == "cpu" or normalised:
            return self.plan(micro_batch_size=usual)
        sizes = sorted({rows, *(usual << k for k in range(64) if usual << k < rows)})
        fitting = {n: plan for n in sizes if (plan := self.plan(micro_batch_size=n)).fits}
        if not fitting:
            return self._smaller() or self.plan(micro_batch_size=usual)
        seconds = {n: plan.seconds for n, plan in fitting.items() if plan.seconds is not None}
        most = (1 + GAIN) * min(seconds.values(), default=0.0)
        fastest = [n for n, taken in seconds.items() if taken <= most]
        plan = fitting[max(fastest, default=min(fitting))]  # the largest has the fewest launches
        note = f"micro-batch size auto: a run takes the fastest that fits, up to {max(fitting):,}"
        if seconds:
            pairs = self.config.global_batch_size
            rates = ", ".join(f"{n:,}: {pairs / taken:,.0f}" for n, taken in seconds.items())
            note += f" (planned pairs/s with {rates})"
        return replace(plan, notes=(note, *plan.notes))

    def _smaller(self) -> Plan | None:
        """The plan with the largest power of two of pairs at a time below `usual` that fits."""
        sizes = (1 << k for k in reversed(range((self.usual - 1).bit_length())))
        plans = (self.plan(micro_batch_size=size) for size in sizes)
        return next((plan for plan in plans if plan.fits), None)

    def largest_batch(self, **sizes: Any) -> int:
        """The largest global batch that fits, to 1/16, with other `sizes`; 0 if none does."""
        batches = [*range(1, 16), *(n << k for k in range(32) for n in range(16, 32))]
        # The smaller ones need not fit: ranks that gather in rounds need less than all at once.
        for batch in reversed(batches):
            if self.plan(global_batch_size=batch, **sizes).fits:
                return batch
        return 0

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
        if smaller := self._smaller():
            return f"--micro-batch-size {smaller.config.micro_batch_size} fits"
        if size := self.largest_batch(micro_batch_size=1):
            batch = f"--global-batch-size {size} does, with a small --micro-batch-size"
            return f"no micro-batch size fits; {batch}"
        more = "" if self.config.grad_checkpointing else ", --grad-checkpointing"
        return f"no batch fits: a smaller model{more} or --parallel fsdp on more GPUs would"


def _giga(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
