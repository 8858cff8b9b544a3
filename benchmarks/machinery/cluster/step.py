"""The simulation of a loss's step, and of a training step around it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from machinery.cluster.hardware import Cluster
from machinery.cluster.schedules import Grid, Ring, Schedule, Workload
from machinery.cluster.timeline import (
    Side,
    Speeds,
    Timeline,
    WithoutTransfers,
    collective_seconds,
)
from megabatch.config.settings import TrainConfig
from megabatch.planning.memory import loss_bytes
from megabatch.similarity import settings

#: Speeds of so many GPUs are drawn at least: the result is the mean over several draws of few GPUs.
DRAWN = 64
#: Rounds that are smaller than the default ones are tried up to this number of them.
ROUNDS = 64


@dataclass(frozen=True)
class Result:
    """One simulated step; means over draws of the ranks' speeds.

    Attributes:
        schedule: its name.
        seconds: from the first rank's begin to the last one's end.
        ideal: seconds of the operations alone, shared by GPUs of mean speed.
        exposed: seconds that the step would be shorter without transfers.
        received: bytes that a rank receives.
        memory: peak bytes of the loss on a rank, besides features and their returned gradients.
    """

    schedule: str
    seconds: float
    ideal: float
    exposed: float
    received: float
    memory: int

    @property
    def efficiency(self) -> float:
        """Share of the ideal."""
        return self.ideal / self.seconds


@dataclass(frozen=True)
class Towers:
    """The encoders of a training step with gradient caching.

    Attributes:
        pairs_per_second: of one GPU in training, without the loss.
        parameter_bytes: of gradients that all ranks average.
        micro_batch: pairs; the gradients are averaged during the last one's backward pass.
    """

    pairs_per_second: float
    parameter_bytes: float
    micro_batch: int = 512


def simulate(
    cluster: Cluster,
    work: Workload,
    schedule: Schedule,
    towers: Towers | None = None,
) -> Result:
    """Simulate a step of the loss, or with `towers` a training step, on all ranks."""
    draws = max(1, DRAWN // cluster.gpus)
    ran = [_run(Timeline, cluster, work, schedule, towers, seed) for seed in range(draws)]
    still = [_run(WithoutTransfers, cluster, work, schedule, towers, seed) for seed in range(draws)]
    seconds = statistics.fmean(float(timeline.now.max()) for timeline in ran)
    without = statistics.fmean(float(timeline.now.max()) for timeline in still)
    operations = sum(work.sweeps) * work.rows**2 * cluster.gpus * work.width
    ideal = cluster.gpu.sweep_seconds(operations, work.width)
    if towers is not None:
        ideal += work.rows / towers.pairs_per_second
    return Result(
        schedule.name,
        seconds,
        ideal,
        max(0.0, seconds - without),
        ran[0].received,
        loss_memory(cluster, work, schedule),
    )


def loss_memory(cluster: Cluster, work: Workload, schedule: Schedule) -> int:
    """Peak bytes of a loss on a rank, besides features and their returned gradients.

    It is the planner's count: see `loss_bytes`.
    """
    config = TrainConfig(loss=work.loss, precision="fp32")  # which leaves features as they are
    dtype = torch.float32 if work.item == 4 else torch.bfloat16
    before = settings.set_gather(schedule.limit)
    try:
        shape = work.rows, work.width, dtype, "cuda", cluster.gpus
        counted = loss_bytes(config, *shape, hosts=cluster.nodes, columns=schedule.columns)
    finally:
        settings.set_gather(before)
    return counted - 2 * work.rows * work.row_bytes


def _run(
    kind: type[Timeline],
    cluster: Cluster,
    work: Workload,
    schedule: Schedule,
    towers: Towers | None,
    seed: int,
) -> Timeline:
    timeline = kind(cluster, Speeds(cluster.gpu.spread, cluster.gpus, seed))
    if towers is None:
        schedule.run(work, timeline)
        return timeline
    # A backward pass takes twice a forward pass's time, and caching encodes everything twice.
    forward = work.rows / towers.pairs_per_second / 4
    last = min(1.0, towers.micro_batch / work.rows) * 2 * forward
    timeline.compute("encode", forward)
    schedule.run(work, timeline)
    timeline.compute("second pass", 3 * forward - last)
    everyone = Side((1, cluster.gpus), 1, cluster.local)
    share = (cluster.gpus - 1) / cluster.gpus
    averaging = [
        timeline.collective("gradients", everyone, share * towers.parameter_bytes)
        for _ in range(2)  # a reduce-scatter and an all-gather
    ]
    timeline.compute("second pass, last micro-batch", last)
    timeline.wait(averaging[-1])
    return timeline


def compare(
    cluster: Cluster, work: Workload, limit: float | None = None
) -> dict[str, tuple[Schedule, Result]]:
    """The best ring, gathering and grid, by these names: the fastest within `limit` bytes, if any.

    Of those within 1% of the fastest it is the one with the least memory.
    """
    kinds: dict[str, list[tuple[Schedule, Result]]] = {}
    for schedule in schedules(cluster, work):
        kind = schedule.name.split()[0]
        kinds.setdefault(kind, []).append((schedule, simulate(cluster, work, schedule)))
    return {kind: best(found, limit) for kind, found in kinds.items()}


def schedules(cluster: Cluster, work: Workload, shapes: int = 3) -> list[Schedule]:
    """The schedules to compare: the ring, gathering, and some grids.

    These are the ones with the shortest transfers, and the one whose rows are nodes, which takes
    little memory. Between nodes gathered columns come in rounds of several sizes, as smaller ones
    hide more of the transfers and larger ones have fewer latencies.
    """
    grids = sorted(grid_shapes(cluster), key=lambda shape: transfer_seconds(cluster, work, shape))
    sizes = (1 / 64, 1 / 8, 1, 8) if cluster.nodes > 1 else (1,)
    found: list[Schedule] = [Ring()]
    by_node = [shape for shape in grids[shapes:] if shape[1] == cluster.local]
    for shape in [(cluster.gpus, 1), *grids[:shapes], *by_node]:
        by_rows = {}
        for size in sizes:
            grid = Grid(shape, round(Grid.gather * size))
            rows = grid.round_rows(work)
            if size >= 1 or work.rows <= ROUNDS * rows:
                by_rows[rows] = grid
        found += by_rows.values()
    return found


def grid_shapes(cluster: Cluster) -> list[tuple[int, int]]:
    """(R, C) of all grids whose rows are whole nodes or equal parts of one."""
    local, gpus = cluster.local, cluster.gpus
    sizes = [c for c in range(2, gpus) if gpus % c == 0 and (c % local == 0 or local % c == 0)]
    return [(gpus // c, c) for c in sizes]


def transfer_seconds(cluster: Cluster, work: Workload, shape: tuple[int, int]) -> float:
    """Seconds of all of a grid's transfers one after another, without their latencies."""
    sent = 0.0
    for side in Grid(shape).sides(cluster):
        rows = (side.size - 1) * work.rows * (2 * work.row_bytes + work.gradient_bytes)
        sent += collective_seconds(cluster, side, rows)
    return sent


def best(
    found: Sequence[tuple[Schedule, Result]], limit: float | None = None
) -> tuple[Schedule, Result]:
    """See `compare`; if no schedule is within the limit, it does not count."""
    fitting = [one for one in found if limit is None or one[1].memory <= limit] or list(found)
    fastest = min(result.seconds for _, result in fitting)
    near = (one for one in fitting if one[1].seconds <= 1.01 * fastest)
    return min(near, key=lambda one: one[1].memory)
