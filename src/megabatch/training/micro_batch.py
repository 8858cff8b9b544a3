"""How a step is divided, found by measurements on a GPU.

`Division` has the number of pairs that go through the towers at a time, and how many of these
micro-batches are encoded once, with activations that wait for the second pass. It follows from
`Trials` of single micro-batches and from the memory that a step takes beside them, the `Room`.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import astuple, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from megabatch.config.settings import TrainConfig, activation_bytes, unmeasured_micro_batch
from megabatch.data import Batch
from megabatch.errors import OutOfMemory, plural
from megabatch.gradient_cache.batches import mapped, named_tensors, take, to_device
from megabatch.gradient_cache.feed import divided
from megabatch.gradient_cache.state import BATCH_NORMS
from megabatch.gradient_cache.wrappers import Wrappers
from megabatch.training.encoders import CachedStep
from megabatch.training.parallel import Layout

#: The pairs of the first trial, and of the first steps if a rank has none at the beginning.
FIRST = 64
#: A larger size is worth it if it is faster by this share; of equally fast ones the largest is.
GAIN = 0.02
#: Seconds that a trial may take.
SECONDS = 20.0

_FORWARD = 1 / 3  # of the time of forward and backward pass
_USABLE = 0.95  # share of free memory that tensors can have, as the allocator leaves gaps
_PASSES = 4  # of a trial, of which the first one compiles


@dataclass(frozen=True)
class Trial:
    """The measurements of a micro-batch with texts of medium length.

    Attributes:
        seconds: of a pair's forward and backward pass.
        graph: bytes of its activations.
        peak: the most bytes that it takes, the graph and its inputs among them; without gradients
            of weights.
    """

    seconds: float
    graph: float
    peak: float

    def times(self, factor: float) -> Trial:
        """The same for a micro-batch that takes so many times as much memory."""
        return replace(self, graph=self.graph * factor, peak=self.peak * factor)


@dataclass(frozen=True)
class Room:
    """The memory of a step, the least of all ranks, by which sizes are judged.

    Attributes:
        share: the most pairs of a rank.
        ranks: number of ranks.
        usable: bytes that tensors can have in total.
        waiting: the most bytes until the gradient of the loss, if no graph waits for it.
        beside: the most bytes of a step without a micro-batch's own.
        bound: the most bytes for kept activations; None: all that are left.
    """

    share: int
    ranks: int
    usable: float
    waiting: float
    beside: float
    bound: int | None

    def fits(self, size: int, trial: Trial) -> bool:
        """Whether a step with micro-batches of this size has enough memory."""
        graph = trial.graph if size >= self.share else 0.0  # a single one is encoded once
        return max(self.waiting + graph, self.beside + trial.peak) <= self.usable

    def kept(self, size: int, trial: Trial) -> int:
        """How many micro-batches' activations can wait for the second pass.

        A single micro-batch is encoded once in any case. On several ranks the one that synchronises
        gradients is always encoded again.
        """
        count = -(-self.share // size)
        if count == 1:
            return 0
        # They wait while others are encoded without a graph, and for the loss. The second pass
        # begins with them; later ones need the room of one.
        left = self.usable - max(self.waiting, self.beside + trial.peak - trial.graph)
        room = left if self.bound is None else min(left, self.bound)
        return max(0, min(count - (self.ranks > 1), int(room // max(1.0, trial.graph))))

    def seconds(self, size: int, trial: Trial) -> float:
        """Seconds per pair in the towers, with the activations kept that fit."""
        count = -(-self.share // size)
        twice = 0.0 if count == 1 else 1 - self.kept(size, trial) / count
        return trial.seconds * (1 + _FORWARD * twice)

    def fastest(self, tried: Mapping[int, Trial]) -> int:
        """The largest of the sizes that are about as fast as the fastest: it has few launches."""
        seconds = {size: self.seconds(size, trial) for size, trial in tried.items()}
        limit = (1 + GAIN) * min(seconds.values())
        return max(size for size, each in seconds.items() if each <= limit)


def search(
    attempt: Callable[[int], Trial | None], first: int, trial: Trial, room: Room
) -> dict[int, Trial]:
    """Try sizes, doubled while that is worth it, and a rank's whole share; returns the trials.

    Args:
        attempt: measures a size, the same on all ranks; None if memory runs out, as it may with all
            texts in one micro-batch, where each is as long as the longest.
        first: the first size. trial: its measurements.
        room: what sizes have to fit in.
    """
    tried, in_vain = {first: trial}, 0
    doubled = [first << k for k in range(1, 32) if first << k < room.share]
    for size in [*doubled, room.share] if first < room.share else []:
        most = max(tried)
        expected = tried[most].times(size / most)
        worth_it = in_vain < 2 or size == room.share
        if not (worth_it and quick(size, expected) and room.fits(size, expected)):
            continue
        found = attempt(size)
        if found is None or not room.fits(size, found):
            continue
        best = min(room.seconds(each, one) for each, one in tried.items())
        in_vain = 0 if room.seconds(size, found) * (1 + GAIN) < best else in_vain + 1
        tried[size] = found
    return tried


def first_rows(size: int, trial: Trial, share: int, memory: float) -> int:
    """The size, doubled while a micro-batch takes at most `memory` bytes.

    Smaller sizes are not the fastest, and each is compiled. ViT-B/32's start took 253 s on an H200
    with sizes from 64 pairs on, of which two steps of 32,768 pairs, 64 at a time, took 64 s instead
    of 6 (benchmarks/results/throughput.json).
    """
    while 2 * size < share and quick(2 * size, trial):
        trial = trial.times(2)
        if trial.peak > memory:
            break
        size *= 2
    return size


def quick(size: int, expected: Trial) -> bool:
    """Whether a trial of this size takes few seconds, as expected from a smaller one."""
    return _PASSES * size * expected.seconds <= SECONDS


class Division:
    """The division of a run's steps into micro-batches, the same on all ranks.

    The size is given, fixed or, if it is "auto" on a GPU, measured. Before that, two steps keep no
    activations, and take as many pairs at a time as a trial with 64 suggests. The first one creates
    the optimizer's state and libraries' workspaces, and the second one's peak shows how much memory
    is left. With batch normalisation the size changes what is learnt, so "auto" is a fixed size;
    also with the loss "maxsim", whose memory depends on the longest text of a batch.

    Attributes:
        rows: pairs that go through the towers at a time.
        kept: how many micro-batches of a step are encoded once, the last ones.
        searches: whether the size is to be measured, or was.
        measures: whether size or number are still to be measured.
    """

    def __init__(
        self, config: TrainConfig, layout: Layout, tell: Callable[[str], None] = print
    ) -> None:
        """`tell` is called with a line for the user on each choice."""
        device = layout.world.device
        self._layout, self._tell, self._steps = layout, tell, 0
        self._share = -(-config.global_batch_size // layout.world.size)
        self._bound = activation_bytes(config, device.type)
        on_gpu = device.type == "cuda"
        self._tokens = config.micro_batch_tokens
        # The share of the free memory for a micro-batch of the first steps, as a trial without
        # graphs needs it. Compiled blocks need about half as much (benchmarks/results/graphs.json).
        self._first_share = 0.75 if config.torchcompile else 0.25
        auto = config.micro_batch_size == "auto" and config.loss != "maxsim" and not self._tokens
        auto = auto and not batch_norms(layout.module)
        self.searches = on_gpu and auto
        rows = FIRST if self.searches else unmeasured_micro_batch(config)
        self.rows = min(self._share, rows)
        self.kept, self._waiting = 0, 0
        self.measures = self.searches or (on_gpu and self._bound != 0 and self.rows < self._share)
        self._conditions = [
            torch.cuda.get_device_name(device) if on_gpu else "cpu",
            *(layout.world.size, config.parallel, config.grad_checkpointing, config.torchcompile),
            *(config.trim_texts, config.activation_memory, config.micro_batch_size),
        ]

    def start(self, trials: Trials) -> bool:
        """Before the first step choose its size, with its batch; returns whether that was done.

        All ranks call it before each step while something is to be measured. If one has no pairs,
        the first steps have at most 64 pairs at a time.
        """
        world = self._layout.world
        if not self.searches or self._steps:
            return False
        if min(world.gather(trials.pairs)) == 0:
            return False
        # Graphs of this size would be compiled for the trial alone.
        with without_a_trace(self._layout), torch.compiler.set_stance("force_eager"):
            first = self._first(trials)
        left = usable_memory(world.device) - torch.cuda.memory_allocated(world.device)
        # There will be gradients and AdamW's state, of each shard or of all weights, and features
        # with their gradients, of which a sum is in float32.
        left -= 3 * sum(p.nbytes for p in self._layout.module.parameters() if p.requires_grad)
        left -= 12 * trials.numbers * self._share
        memory = self._first_share * min(world.gather(left))
        self.rows = first_rows(self.rows, first, self._share, memory)
        return True

    def after_loss(self) -> None:
        """When the gradient of the loss is there: what a step takes until then is measured."""
        self._waiting = torch.cuda.max_memory_allocated(self._layout.world.device)

    def after_step(self, trials: Trials) -> bool:
        """After the second step, measure, with its batch; returns whether that was done.

        All ranks call it after each step while something is to be measured. If one has no pairs,
        the next step measures.
        """
        world = self._layout.world
        self._steps += 1
        if self._steps == 1:
            torch.cuda.reset_peak_memory_stats(world.device)
        if self._steps == 1 or min(world.gather(trials.pairs)) == 0:
            return False
        peak = torch.cuda.max_memory_allocated(world.device)
        free, rows = usable_memory(world.device), self.rows
        with without_a_trace(self._layout):
            first = self._first(trials)
            own = (-free, self._waiting or peak, peak - first.peak / trials.longer)
            usable, waiting, beside = map(max, zip(*world.gather(own), strict=True))
            room = Room(self._share, world.size, -usable, waiting, beside, self._bound)
            tried = {rows: first}
            if self.searches:
                tried = search(lambda size: self._agreed(trials, size), rows, first, room)
        self.rows, self.measures = room.fastest(tried), False
        self.kept = room.kept(self.rows, tried[self.rows])
        torch.cuda.reset_peak_memory_stats(world.device)
        count, mib = -(-self._share // self.rows), tried[self.rows].graph / 2**20
        rates = ", ".join(f"{s:,}: {1 / room.seconds(s, t):,.0f}" for s, t in tried.items())
        self._tell(
            f"micro-batches of {plural(self.rows, 'pair')} (pairs/s through the towers: {rates}); "
            f"the activations of {self.kept} of {count} are kept, {mib:,.1f} MiB each"
        )
        return True

    def less_memory(self) -> str:
        """What to say if memory runs out in a step."""
        kept = f" and {plural(self.kept, 'micro-batch')} kept" if self.kept else ""
        at_a_time, smaller = plural(self.rows, "pair"), "--activation-memory or --micro-batch-size"
        if self._tokens:
            at_a_time, smaller = f"at most {plural(self._tokens, 'token')}", "--micro-batch-tokens"
        return (
            f"out of memory with {at_a_time} at a time{kept} (--resume with a smaller {smaller}, "
            "--grad-checkpointing or --parallel fsdp needs less)"
        )

    def state(self) -> dict[str, Any]:
        """The choice, for a checkpoint."""
        made = None if self.measures else (self.rows, self.kept)
        return {"made": made, "conditions": self._conditions}

    def load_state(self, state: dict[str, Any]) -> None:
        """Take over a choice that was made in the same conditions on all ranks."""
        same = bool(state["made"]) and state["conditions"] == self._conditions
        if self.measures and all(self._layout.world.gather(same)):
            (self.rows, self.kept), self.measures = state["made"], False

    def _first(self, trials: Trials) -> Trial:
        """A trial of the present size."""
        trial = self._agreed(trials, self.rows)
        if trial is None:
            raise OutOfMemory(
                f"out of memory in a trial with {plural(self.rows, 'pair')} at a time; set "
                "--micro-batch-size to a smaller number"
            )
        return trial

    def _agreed(self, trials: Trials, size: int) -> Trial | None:
        """A trial, with the largest measurements of all ranks; None if memory ran out on one."""
        world = self._layout.world
        try:
            own = astuple(trials(size))
        except torch.OutOfMemoryError:
            own = None
        found = world.gather(own)
        if None in found:
            return None
        return Trial(*map(max, zip(*found, strict=True))).times(trials.longer)


class Trials:
    """Runs micro-batches of a size through the towers, as both passes of a step do.

    Attributes:
        pairs: those of a batch, the texts sorted and cut as in a step.
        numbers: those in the features of a pair, after the first trial.

    Args:
        step: of the trainer, whose towers, lengths and device are used.
        batch: this rank's part of a step's batch.
        autocast: makes the context of the forward passes.
    """

    def __init__(
        self, step: CachedStep, batch: Batch, autocast: Callable[[], AbstractContextManager[Any]]
    ) -> None:
        self._step, self._batch, self._autocast = step, batch, autocast
        self.pairs, self.numbers = len(batch), 0

    @property
    def longer(self) -> float:
        """How many times as many tokens a micro-batch of another batch may have, at least 1.

        Its texts are assumed to be similar, but one of them to have all tokens that the model
        takes.
        """
        count = -(-self.pairs // self._step.micro_batch_size)
        texts = self._step.sorted_towers(self._batch).values() if count else ()
        return max((each.longer(count) for each in texts), default=1.0)

    def __call__(self, size: int) -> Trial:
        """The measurements of a size; raises torch.OutOfMemoryError."""
        torch.cuda.empty_cache()
        device = self._step.device
        inputs, pairs = self._inputs(min(size, self.pairs))
        # The first pass compiles. It also allocates the weights' gradients, which are as large for
        # any number of pairs.
        self._pass(inputs)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        seconds, graph, numbers = min(self._pass(inputs) for _ in range(_PASSES - 1))
        self.numbers = numbers // pairs
        peak = torch.cuda.max_memory_allocated(device) - before
        # Another micro-batch's inputs are on their way while one is computed.
        peak += 2 * sum(tensor.nbytes for tensor in named_tensors(inputs).values())
        self._step.module.zero_grad(set_to_none=True)
        return Trial(seconds / pairs, graph, peak)

    def _inputs(self, size: int) -> tuple[dict[str, Any], int]:
        """Inputs by tower of the middle micro-batch of this size, on the device; and its pairs."""
        batch, device = self._batch, self._step.device
        by_length = self._step.sorted_towers(batch)
        parts = divided(self.pairs, size, by_length)
        middle = parts[len(parts) // 2]
        pairs = middle.rows.stop - middle.rows.start
        inputs = take({"image": batch.images, "text": batch.texts}, slice(0, pairs), self.pairs)
        inputs |= {tower: texts.take(middle.of(tower)) for tower, texts in by_length.items()}
        return mapped(inputs, functools.partial(to_device, device=device)), pairs

    def _pass(self, inputs: dict[str, Any]) -> tuple[float, int, int]:
        """Seconds of both passes, bytes of the graph, numbers in the features of a micro-batch."""
        device, locked = self._step.device, self._step.locked
        torch.cuda.synchronize(device)
        start = time.perf_counter()
        with self._autocast():
            if locked is not None:
                with torch.no_grad():
                    self._encode({locked: inputs[locked]})
            before = torch.cuda.memory_allocated(device)
            outputs = self._encode({t: part for t, part in inputs.items() if t != locked})
            graph = torch.cuda.memory_allocated(device) - before
            trained = [output for output in outputs if output.requires_grad]
            torch.autograd.backward(trained, [torch.ones_like(output) for output in trained])
        torch.cuda.synchronize(device)
        return time.perf_counter() - start, graph, sum(output.numel() for output in outputs)

    def _encode(self, inputs: dict[str, Any]) -> list[Tensor]:
        outputs = self._step.module(inputs.get("image"), inputs.get("text"))
        return [output for output in outputs.values() if output is not None]


def usable_memory(device: torch.device) -> float:
    """Bytes that tensors can have in total on a GPU."""
    return _USABLE * (torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device))


@contextlib.contextmanager
def without_a_trace(layout: Layout) -> Iterator[None]:
    """Run forward and backward passes inside that change nothing and synchronise no gradients.

    Afterwards buffers and torch's random numbers are as before, and there are no gradients. FSDP2's
    whole weights are gathered beforehand, so ranks need not make the same passes inside.
    """
    module, device = layout.module, layout.world.device
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


def batch_norms(module: nn.Module) -> list[nn.Module]:
    """The layers that normalise over a micro-batch: those of a locked tower do not.

    Statistics are over the samples that go through the model together, the same in both passes.
    So a run depends on the micro-batch size, and gradients are exact for that function, not for one
    that normalises over the whole batch.
    """
    return [m for m in module.modules() if isinstance(m, BATCH_NORMS) and m.training]
