"""How many micro-batches are encoded once, with activations that wait for the second pass."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import torch

from megabatch.config.settings import TrainConfig, activation_bytes
from megabatch.errors import OutOfMemory, plural
from megabatch.gradient_cache.checks import OutOfMemoryOnAllRanks
from megabatch.gradient_cache.offload import StepMemory, free
from megabatch.planning.machine import FRAGMENTATION
from megabatch.planning.micro_batches import kept_at_most, kept_count
from megabatch.training.parallel import Layout
from megabatch.training.world import World


class KeptActivations:
    """Chooses the number of micro-batches whose activations are kept, the same on all ranks.

    On a GPU it follows from measurements. The first two steps keep none: the first one creates the
    optimizer's state and libraries' workspaces, and the second one's peak shows how much memory is
    free, and the size of each micro-batch's graph. On the CPU, whose allocator reports no peak,
    memory is bounded by the setting alone, and a micro-batch's activations are counted as in a
    plan.

    Attributes:
        count: micro-batches kept per step; None before it is known.
        news: lines for the user about choices since they were last cleared.
    """

    def __init__(self, config: TrainConfig, world: World, micro_batch_size: int) -> None:
        self._world = world
        self._device = world.device
        self._bound = activation_bytes(config, world.device.type)
        rows = -(-config.global_batch_size // world.size)
        micro_batches = -(-rows // micro_batch_size)
        self._micro_batches = micro_batches
        self._possible = kept_at_most(micro_batches, world.size)
        self._steps = 0
        self.news: list[str] = []
        none = self._bound == 0 or not self._possible
        self.count: int | None = 0 if none else None
        on_gpu = self._device.type == "cuda"
        self._conditions = [
            torch.cuda.get_device_name(self._device) if on_gpu else "cpu",
            *(world.size, config.activation_memory, micro_batch_size),
            *(config.parallel, config.grad_checkpointing, config.torchcompile),
        ]

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
        self.news.append(
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
        # Not the largest: the first one has autocast's casts of weights, too.
        room = room_for_graphs(memory, int(statistics.median(graphs)), *gpu_memory(self._device))
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
        self.news.append(
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


def gpu_memory(device: torch.device) -> tuple[int, int]:
    """Bytes that tensors can have in total on a GPU, and the allocator's peak."""
    usable = free(device) + torch.cuda.memory_allocated(device)
    return int(usable * (1 - FRAGMENTATION)), torch.cuda.max_memory_allocated(device)


def room_for_graphs(memory: StepMemory, graph: int, usable: int, peak: int) -> int:
    """Bytes that waiting graphs can take, after a step without any.

    They stay in memory during the loss, in addition to all that the step had until its second pass.
    They go backward before others are encoded, so the second pass's own graph is one of them.
    """
    return usable - max(memory.peak_before_second_pass, peak - graph)
