"""How a step is divided, found by measurements on a GPU.

`MicroBatchSize` chooses the number of pairs that go through the towers at a time, `KeptActivations`
how many of these micro-batches are encoded once, with activations that wait for the second pass.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megabatch.config.settings import (
    UNMEASURED_MICRO_BATCH,
    TrainConfig,
    activation_bytes,
    unmeasured_micro_batch,
)
from megabatch.data import Batch
from megabatch.errors import OutOfMemory, plural
from megabatch.gradient_cache.batches import MicroBatch, divided, to_device
from megabatch.gradient_cache.outputs import StepMemory
from megabatch.gradient_cache.second_pass import OutOfMemoryOnAllRanks
from megabatch.gradient_cache.wrappers import Wrappers
from megabatch.models.towers import locked_towers
from megabatch.planning.machine import FRAGMENTATION
from megabatch.planning.memory import loss_bytes, state_bytes
from megabatch.planning.micro_batches import kept_at_most, kept_count
from megabatch.planning.plan import GAIN, largest_of_fastest
from megabatch.training.batch_norm import batch_norms
from megabatch.training.encoders import CachedStep
from megabatch.training.parallel import Layout
from megabatch.training.world import World

#: The first size that is tried, and the smallest unless it does not fit.
FIRST = UNMEASURED_MICRO_BATCH
#: After this many sizes in a row without such a gain, no larger one is tried.
WITHOUT_GAIN = 2
#: Seconds that all trials may take together.
SECONDS = 100.0

_SAMPLE = 64  # pairs of a batch, repeated, that a micro-batch of one shape consists of
_ROUNDS = 3  # timed repetitions


class Gauge:
    """A GPU's clock and memory."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def seconds(self) -> float:
        """The time when all work launched so far is done."""
        torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def usable(self) -> int:
        """Bytes that are still available for tensors."""
        return gpu_memory(self.device)[0] - self.allocated()

    def allocated(self) -> int:
        """Bytes of tensors."""
        return torch.cuda.memory_allocated(self.device)

    def peak(self) -> int:
        """The most bytes of tensors since the last `reset`."""
        return torch.cuda.max_memory_allocated(self.device)

    def reset(self) -> None:
        """Return unused memory to the device, and begin a new peak."""
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)


@dataclass(frozen=True)
class Trial:
    """The measurements of one size, on a micro-batch with texts of medium length.

    Attributes:
        first: seconds per pair of a forward pass without a graph.
        second: seconds per pair of the second pass, and of a locked tower's forward pass.
        graph: bytes of a micro-batch's activations.
        peak: the most bytes in addition to those before.
    """

    first: float
    second: float
    graph: int
    peak: int


class MicroBatchSize:
    """The micro-batch size of a run: given, fixed or, if it is "auto" on a GPU, measured.

    With batch normalisation the size changes what is learnt, so "auto" is a fixed size there.

    Attributes:
        rows: the size; before a measurement, that of a run without any.
        measured: whether it was measured, in this run or before it was resumed.
        gauge: measures sizes; None if there is nothing to measure.
    """

    def __init__(
        self,
        config: TrainConfig,
        module: nn.Module,
        world: World,
        tell: Callable[[str], None] = print,
    ) -> None:
        """`tell` is called with a line for the user on the size that was found."""
        self._config, self._module, self._world, self._tell = config, module, world, tell
        self.rows = unmeasured_micro_batch(config)
        self.measured = False
        auto = config.micro_batch_size == "auto" and not batch_norms(module)
        self.gauge = Gauge(world.device) if auto and world.device.type == "cuda" else None
        self._conditions = conditions(config, world)

    def find(
        self,
        step: CachedStep,
        batch: Batch,
        layout: Layout,
        autocast: Callable[[], AbstractContextManager[Any]],
        *,
        optimizer_state: bool,
    ) -> bool:
        """Measure, if that is still to be done; all ranks call it before each step.

        Args:
            step: of the trainer, whose towers, lengths and device are used.
            batch: this rank's part of the step's batch.
            layout: of the module.
            autocast: makes the context of the forward passes.
            optimizer_state: whether the optimizer's state is in memory already.

        Returns:
            Whether the size is known only now. It is not if a rank has no pairs; then the next step
            measures.

        Raises:
            OutOfMemory: memory runs out with one pair on some rank.
        """
        gauge, world, config = self.gauge, self._world, self._config
        if self.measured or gauge is None or min(world.gather(len(batch))) == 0:
            return False
        trials = Trials(step, batch, gauge, autocast)
        rows = -(-config.global_batch_size // world.size)

        def room() -> int:
            return gauge.usable() - self._reserved(rows, trials.features, optimizer_state)

        def restart() -> None:
            if not layout.abandon_step():
                raise OutOfMemory(
                    "out of memory while micro-batch sizes were tried, after which FSDP2 of this "
                    "torch cannot continue; set --micro-batch-size to a number"
                )
            layout.gather_weights()

        with without_a_trace(layout, world.device):
            search = Search(
                *(trials, rows, world, room, gauge.seconds),
                restart=restart,
                bound=activation_bytes(config, world.device.type),
            )
            self.rows = search.find()
        gauge.reset()
        self.measured = True
        self._tell(search.summary(self.rows))
        return True

    def _reserved(self, rows: int, features: Tensor, optimizer_state: bool) -> int:
        """Bytes that a step takes in addition to a micro-batch, and that are not allocated yet."""
        config, module = self._config, self._module
        width, dtype = features.shape[-1], features.dtype
        locked = locked_towers(module)
        kind, ranks = self._world.device.type, self._world.size
        later = 0 if optimizer_state else state_bytes(module, config, ranks).optimizer
        # At the end of the first pass micro-batches are concatenated: both copies exist.
        cached = 2 * (2 + config.hard_negatives) * rows * width * dtype.itemsize
        return later + cached + loss_bytes(config, rows, width, dtype, kind, ranks, locked)

    def state(self) -> dict[str, Any]:
        """The choice, for a checkpoint."""
        return {"rows": self.rows if self.measured else None, "conditions": self._conditions}

    def load_state(self, state: dict[str, Any]) -> bool:
        """Take over a size that was measured in the same conditions on all ranks.

        Returns:
            Whether there was one.
        """
        same = bool(state.get("rows")) and state["conditions"] == self._conditions
        if self.gauge is None or not all(self._world.gather(same)):
            return False
        self.rows, self.measured = state["rows"], True
        return True


class Search:
    """Finds the fastest size by trials, the same ones in the same order on all ranks.

    Sizes are doubled as long as that is expected to fit and is worth it; the size of a rank's whole
    share, which is encoded once, is tried in any case. The size is that of `largest_of_fastest`.

    Args:
        trial: measures a size on this rank; None if it does not fit.
        largest: the most rows that a rank has.
        world: the ranks.
        room: bytes that a trial's peak may take; called after the first trial.
        clock: seconds.
        restart: called on all ranks after a size did not fit on some of them.
        bound: bytes for kept activations; None: all that are left.
    """

    def __init__(
        self,
        trial: Callable[[int], Trial | None],
        largest: int,
        world: World,
        room: Callable[[], int],
        clock: Callable[[], float],
        *,
        restart: Callable[[], None],
        bound: int | None = 0,
    ) -> None:
        self._restart = restart
        self._trial, self._largest, self._world = trial, largest, world
        self._measure_room, self._clock, self._bound = room, clock, bound
        self._room: int | None = None
        self._began = clock()
        self._elapsed = self._last = 0.0
        self.tried: dict[int, Trial] = {}

    def find(self) -> int:
        """The size.

        Raises:
            OutOfMemory: memory runs out with one row.
        """
        size = first = min(FIRST, self._largest)
        while not self._fits(size):
            if size == 1:
                raise OutOfMemory("out of memory with a single pair at a time")
            size //= 2
        if size < first:
            return size
        in_vain = 0
        while size * 2 < self._largest and in_vain < WITHOUT_GAIN:
            best = min(map(self.seconds, self.tried))
            if not self._promising(size * 2) or not self._fits(size * 2):
                break
            size *= 2
            in_vain = 0 if self.seconds(size) * (1 + GAIN) < best else in_vain + 1
        if self._largest not in self.tried and self._promising(self._largest):
            self._fits(self._largest)
        return largest_of_fastest({size: self.seconds(size) for size in self.tried})

    def seconds(self, size: int) -> float:
        """Seconds per pair with a size that was tried, with the activations kept that fit."""
        trial, micro_batches = self.tried[size], -(-self._largest // size)
        if micro_batches == 1:
            return trial.second
        assert self._room is not None
        room = self._room - (trial.peak - trial.graph)
        possible = kept_at_most(micro_batches, self._world.size)
        kept = kept_count([(trial.graph, micro_batches)], possible, self._bound, room)
        return trial.second + trial.first * (1 - kept / micro_batches)

    def summary(self, chosen: int) -> str:
        """A line for the user, with the rates of one process."""
        rates = ", ".join(f"{s:,}: {1 / self.seconds(s):,.0f}" for s in sorted(self.tried))
        return (
            f"micro-batches of {plural(chosen, 'pair')}, found in {self._elapsed:.0f} s (pairs/s "
            f"through the towers with {rates})"
        )

    def _promising(self, size: int) -> bool:
        """Whether a size should fit, in memory and in time, by the largest one that was tried."""
        assert self._room is not None
        most = max(self.tried)
        trial = self.tried[most]
        of_pair = (2 + _ROUNDS) * (trial.first + trial.second)  # seconds of a trial
        compilation = max(0.0, self._last - most * of_pair)
        seconds = self._elapsed + size * of_pair + compilation
        return seconds <= SECONDS and trial.peak * size / most <= self._room

    def _fits(self, size: int) -> bool:
        """Try a size on all ranks, and keep its measurements: the largest of all ranks."""
        own = self._trial(size)
        if self._room is None and own is not None:
            self._room = self._measure_room()
        seconds = self._clock() - self._began
        found = self._world.gather((own and astuple(own), self._room, seconds))
        trials, rooms, elapsed = zip(*found, strict=True)
        self._last = max(elapsed) - self._elapsed
        self._elapsed += self._last
        if any(trial is None for trial in trials):
            self._restart()
            return False
        self._room = min(rooms)
        trial = Trial(*map(max, zip(*trials, strict=True)))
        fits = trial.peak <= self._room or size == 1  # nothing smaller could be tried
        if fits:
            self.tried[size] = trial
        return fits


class Trials:
    """Runs micro-batches of a size through the towers, as both passes of a step do.

    Texts are those of the batch, sorted and cut as in a step; but the peak is that of whole ones,
    as another batch may have longer texts. Other inputs are copies of its first rows: late images
    are not decoded for nothing.

    Attributes:
        features: an output (n, width) of the last trial's towers.
    """

    features: Tensor

    def __init__(
        self,
        step: CachedStep,
        batch: Batch,
        gauge: Gauge,
        autocast: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        self._module, self._locked, self._device = step.module, step.locked, step.device
        self._sorted = step.sorted_towers(batch)
        self._samples = {
            tower: to_device(inputs[:_SAMPLE], self._device)
            for tower, inputs in (("image", batch.images), ("text", batch.texts))
            if tower not in self._sorted
        }
        self._pairs, self._gauge, self._autocast = len(batch), gauge, autocast

    def __call__(self, size: int) -> Trial | None:
        """The measurements of a size; None if memory runs out."""
        self._gauge.reset()
        try:
            return self._measured(min(size, self._pairs))
        except torch.OutOfMemoryError:
            pass
        finally:  # not in the handler: the exception keeps tensors alive
            self._module.zero_grad(set_to_none=True)
        return None

    def _measured(self, size: int) -> Trial:
        gauge = self._gauge
        before = gauge.allocated()
        copies = {
            tower: sample.repeat(-(-size // len(sample)), *[1] * (sample.ndim - 1))[:size]
            for tower, sample in self._samples.items()
        }
        rows = slice(0, size)
        whole = {tower: texts.batch[rows] for tower, texts in self._sorted.items()}
        largest = copies | {t: to_device(texts, self._device) for t, texts in whole.items()}
        self._passes(largest)
        largest_bytes = sum(tensor.nbytes for tensor in largest.values())
        middle = divided(self._pairs, size, self._sorted)[-(-self._pairs // size) // 2]
        inputs = self._inputs(middle, copies)
        self._passes(inputs)
        first, second, graph = min(
            (self._passes(inputs) for _ in range(_ROUNDS)), key=lambda figures: sum(figures[:2])
        )
        pairs = middle.rows.stop - middle.rows.start
        # Another micro-batch's inputs are on their way while one is computed.
        return Trial(first / pairs, second / pairs, graph, gauge.peak() - before + largest_bytes)

    def _inputs(self, micro_batch: MicroBatch, copies: dict[str, Tensor]) -> dict[str, Tensor]:
        """Inputs of each tower for a micro-batch, on the device."""
        rows = micro_batch.rows
        cut = {
            tower: to_device(texts.take(micro_batch.of(tower)), self._device)
            for tower, texts in self._sorted.items()
        }
        return {tower: part[: rows.stop - rows.start] for tower, part in copies.items()} | cut

    def _passes(self, inputs: dict[str, Tensor]) -> tuple[float, float, int]:
        """Seconds of the first pass over a micro-batch and of the rest of a step; graph's bytes."""
        gauge = self._gauge
        start = gauge.seconds()
        with torch.no_grad(), self._autocast():
            self._trained(inputs)
        middle = gauge.seconds()
        with self._autocast():
            if self._locked is not None:
                with torch.no_grad():
                    self._encode({self._locked: inputs[self._locked]})
            before = gauge.allocated()
            outputs = self._trained(inputs)
            graph = gauge.allocated() - before
            trained = [output for output in outputs if output.requires_grad]
            torch.autograd.backward(trained, [torch.ones_like(output) for output in trained])
        self.features = next(t.detach() for t in outputs if t.ndim == 2)
        return middle - start, gauge.seconds() - middle, graph

    def _trained(self, inputs: dict[str, Tensor]) -> list[Tensor]:
        return self._encode({t: part for t, part in inputs.items() if t != self._locked})

    def _encode(self, inputs: dict[str, Tensor]) -> list[Tensor]:
        outputs = self._module(inputs.get("image"), inputs.get("text"))
        return [output for output in outputs.values() if output is not None]


@contextlib.contextmanager
def without_a_trace(layout: Layout, device: torch.device) -> Iterator[None]:
    """Run forward and backward passes inside that change nothing and synchronise no gradients.

    Afterwards buffers and torch's random numbers are as before, and there are no gradients. (Blocks
    stay compiled for the shapes that they had inside, as a step needs some of them.)

    FSDP2's whole weights are gathered beforehand. So ranks need not make the same passes inside,
    for example if memory runs out on one of them.
    """
    module = layout.module
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    unsynchronised = Wrappers(layout.model.modules()).synchronising(False)
    devices = [device] if device.type == "cuda" else []
    layout.gather_weights()
    try:
        with torch.random.fork_rng(devices), torch.enable_grad(), unsynchronised:
            yield
    finally:
        module.zero_grad(set_to_none=True)
        layout.end_step()
        module.zero_grad(set_to_none=True)
        for name, buffer in module.named_buffers():
            buffer.copy_(buffers[name])


class KeptActivations:
    """Chooses the number of micro-batches whose activations are kept, the same on all ranks.

    On a GPU it follows from measurements. The first two steps keep none: the first one creates the
    optimizer's state and libraries' workspaces, and the second one's peak shows how much memory is
    free, and the size of each micro-batch's graph. On the CPU, whose allocator reports no peak,
    memory is bounded by the setting alone, and a micro-batch's activations are counted as in a
    plan.

    Attributes:
        count: micro-batches kept per step; None before it is known.
    """

    def __init__(
        self,
        config: TrainConfig,
        world: World,
        micro_batch_size: int,
        tell: Callable[[str], None] = print,
    ) -> None:
        """`tell` is called with a line for the user on each choice."""
        self._world, self._tell = world, tell
        self._device = world.device
        self._bound = activation_bytes(config, world.device.type)
        rows = -(-config.global_batch_size // world.size)
        micro_batches = -(-rows // micro_batch_size)
        self._micro_batches = micro_batches
        self._possible = kept_at_most(micro_batches, world.size)
        self._steps = 0
        none = self._bound == 0 or not self._possible
        self.count: int | None = 0 if none else None
        self._conditions = [*conditions(config, world), micro_batch_size]

    @property
    def measures(self) -> bool:
        """Whether the number follows from steps on a GPU, and is not known yet."""
        return self.count is None and self._device.type == "cuda"

    def choose(self, graphs: Sequence[int], room: int | None = None) -> None:
        """Set the number, by agreement of all ranks.

        Args:
            graphs: bytes of each micro-batch's activations, of which the last ones are kept; or of
                one micro-batch, if all have as many.
            room: bytes that are free for them; None if only the setting bounds them.
        """
        if len(graphs) == 1:
            graphs = [*graphs] * self._micro_batches
        own = kept_count([(graph, 1) for graph in graphs], self._possible, self._bound, room)
        self.count = min(self._world.gather(own))
        if self._micro_batches == 1:  # encoded once, whatever the setting
            return
        mean = statistics.mean(graphs[-self.count :])  # of all if none is kept
        others = "" if self.count == self._micro_batches else "; the others are encoded twice"
        self._tell(
            f"the activations of {self.count} of {self._micro_batches} micro-batches "
            f"({mean / 2**20:,.1f} MiB each) are kept for the backward pass{others}"
        )

    def after_step(self, memory: StepMemory, longer_texts: float = 1.0) -> None:
        """Measure, if a number is still to be chosen; all ranks call it after each step.

        Args:
            memory: of the steps so far.
            longer_texts: how many times as many tokens a micro-batch of another batch may have.
        """
        if not self.measures:
            return
        self._steps += 1
        if self._steps == 1:
            torch.cuda.reset_peak_memory_stats(self._device)
            return
        graphs = [*map(sum, zip(*memory.graphs.values(), strict=True))]
        usable, peak = gpu_memory(self._device)
        # The graphs stay in memory during the loss, in addition to all that the step had until its
        # second pass. They go backward before others are encoded, so the second pass's own graph is
        # one of them: the median, as the first one has autocast's casts of weights, too.
        second_pass = peak - int(statistics.median(graphs))
        room = usable - max(memory.peak_before_second_pass, second_pass)
        # Micro-batches have equal tokens, so all graphs would be as much larger.
        self.choose(graphs, int(room / longer_texts))

    def fewer(self, layout: Layout, error: torch.OutOfMemoryError) -> bool:
        """Halve the number after memory ran out; False if no activations were kept.

        Raises:
            OutOfMemory: the step cannot be repeated. Other ranks do not know of the error, and may
                be waiting for this one inside a collective; or FSDP2 cannot.
        """
        if not self.count:
            return False
        agreed = self._world.size == 1 or isinstance(error, OutOfMemoryOnAllRanks)
        if not (agreed and layout.abandon_step()):
            raise OutOfMemory(
                f"rank {self._world.rank}: out of memory with the activations of "
                f"{plural(self.count, 'micro-batch')} kept; continue with --resume and a smaller "
                "--activation-memory (0 keeps none)"
            )
        before, self.count = self.count, self.count // 2
        self._tell(
            f"out of memory with the activations of {plural(before, 'micro-batch')}: the step is "
            f"repeated with those of {self.count}"
        )
        return True

    def state(self) -> dict[str, Any]:
        """The choice, for a checkpoint."""
        return {"count": self.count, "conditions": self._conditions}

    def load_state(self, state: dict[str, Any]) -> None:
        """Take over the choice of a run in the same conditions on all ranks, or make it again."""
        same = state.get("conditions") == self._conditions
        if all(self._world.gather(same)):
            self.count = state["count"]


def conditions(config: TrainConfig, world: World) -> list[Any]:
    """A resumed run takes over a choice that was made in the same conditions."""
    on_gpu = world.device.type == "cuda"
    return [
        torch.cuda.get_device_name(world.device) if on_gpu else "cpu",
        *(world.size, config.parallel, config.grad_checkpointing, config.torchcompile),
        *(config.trim_texts, config.activation_memory),
    ]


def gpu_memory(device: torch.device) -> tuple[int, int]:
    """Bytes that tensors can have in total on a GPU, and the allocator's peak."""
    usable = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    return int(usable * (1 - FRAGMENTATION)), torch.cuda.max_memory_allocated(device)
