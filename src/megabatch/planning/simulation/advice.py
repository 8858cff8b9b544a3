"""The simulation of a planned run: which schedule it should take, as `megabatch plan` prints."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from megabatch.config.settings import TrainConfig
from megabatch.planning.plan import Plan
from megabatch.planning.simulation.hardware import Cluster
from megabatch.planning.simulation.schedules import SWEEPS, Grid, Ring, Schedule, Workload, default
from megabatch.planning.simulation.step import Result, Towers, best, compare, simulate


@dataclass(frozen=True)
class Candidate:
    """A schedule, its simulated loss, and a training step with it if the towers' speed is known."""

    schedule: Schedule
    loss: Result
    step: Result | None


@dataclass(frozen=True)
class Advice:
    """The simulation of a run.

    `candidates`: the best ring, gathering and grid. `default`: the library's own choice.
    """

    cluster: Cluster
    work: Workload
    candidates: tuple[Candidate, ...]
    best: Candidate
    default: Candidate


def advise(plan: Plan, cluster: Cluster, width: int, towers: Towers | None) -> Advice:
    """Simulate a plan's loss, one of `SWEEPS`, on a cluster by each schedule.

    Args:
        plan: of the run; schedules whose memory exceeds what it leaves free are not taken, if
            others do not.
        cluster: its machines.
        width: of the features.
        towers: the speed of the encoders, if a training step is to be simulated as well.
    """
    config = plan.config
    rows = -(-config.global_batch_size // cluster.gpus)
    item = 4 if config.precision == "fp32" else 2
    widths = sum(config.matryoshka_dims) or width
    work = Workload(rows, widths, SWEEPS[config.loss], item, config.loss)
    found = compare(cluster, work, _free(plan, config))

    def candidate(schedule: Schedule, loss: Result) -> Candidate:
        step = simulate(cluster, work, schedule, towers) if towers else None
        return Candidate(schedule, loss, step)

    candidates = [candidate(*one) for one in found.values()]
    taken, _ = best(list(found.values()), _free(plan, config))
    chosen = next(one for one in candidates if one.schedule is taken)
    own = default(cluster, work)
    return Advice(
        cluster, work, tuple(candidates), chosen, candidate(own, simulate(cluster, work, own))
    )


def _free(plan: Plan, config: TrainConfig) -> int:
    """Bytes of a GPU that the plan leaves for the loss."""
    loss = sum(part.nbytes.get("loss", 0) for part in plan.parts if part.note == config.loss)
    return plan.machine.limit - plan.total("loss") + loss


def print_advice(advice: Advice, console: Console) -> None:
    """Print a table of the schedules and the one to take."""
    cluster = advice.cluster
    rate = f"{cluster.gpu.product_rate / 1e12:,.0f} TFLOP/s"
    table = Table(
        title=f"the loss, simulated: {cluster.gpus:,} GPUs, {cluster.local} a node, {rate} each",
        title_justify="left",
        box=None,
        pad_edge=False,
        show_edge=False,
    )
    heads = ("ms", "efficiency", "exposed transfers, ms", "received, MiB", "memory, MiB")
    steps = ("a step, s", "efficiency") if advice.best.step is not None else ()
    table.add_column("", no_wrap=True)
    for head in (*heads, *steps):
        table.add_column(head, justify="right")
    for one in advice.candidates:
        loss, step = one.loss, one.step
        cells = [
            f"{1e3 * loss.seconds:,.3g}" if loss.seconds < 1 else f"{1e3 * loss.seconds:,.0f}",
            f"{loss.efficiency:.0%}",
            f"{1e3 * loss.exposed:,.3g}" if loss.exposed < 1 else f"{1e3 * loss.exposed:,.0f}",
            f"{loss.received / 2**20:,.0f}",
            f"{loss.memory / 2**20:,.0f}",
        ]
        if step is not None:
            cells += [f"{step.seconds:,.3g}", f"{step.efficiency:.0%}"]
        table.add_row(described(one.schedule, advice.work), *cells)
    console.print(table)
    best, own = advice.best, advice.default
    console.print(f"the schedule to take: {described(best.schedule, advice.work)}")
    slower = max(0.0, own.loss.seconds / best.loss.seconds - 1)
    name = described(own.schedule, advice.work)
    if name != described(best.schedule, advice.work):
        console.print(f"the library's default: {name}, its loss {slower:.1%} slower")


def described(schedule: Schedule, work: Workload) -> str:
    """A schedule's name, with its rounds if it has several."""
    if isinstance(schedule, Ring):
        return schedule.name
    assert isinstance(schedule, Grid)
    rounds = -(-work.rows // schedule.round_rows(work))
    return schedule.name + (f" in {rounds:,} rounds" if rounds > 1 else "")


def to_json(advice: Advice) -> dict[str, Any]:
    """The advice for JSON: seconds and bytes."""
    return {
        "cluster": asdict(advice.cluster),
        "rows": advice.work.rows,
        "width": advice.work.width,
        "schedules": [_candidate(one, advice.work) for one in advice.candidates],
        "best": _candidate(advice.best, advice.work),
        "default": _candidate(advice.default, advice.work),
    }


def _candidate(one: Candidate, work: Workload) -> dict[str, Any]:
    return {
        "schedule": described(one.schedule, work),
        "gather": one.schedule.gather if isinstance(one.schedule, Grid) else None,
        **{key: value for key, value in asdict(one.loss).items() if key != "schedule"},
        "efficiency": one.loss.efficiency,
        "step": None
        if one.step is None
        else {"seconds": one.step.seconds, "efficiency": one.step.efficiency},
    }
