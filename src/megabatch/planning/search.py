"""The fastest size of micro-batches, by the plan's memory and time (`megabatch plan --search`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from rich.console import Console
from rich.table import Table

from megabatch.config.settings import unmeasured_micro_batch
from megabatch.planning.plan import Plan, Planner

#: The smallest size that is tried, unless a process has fewer pairs.
SMALLEST = 128
#: Sizes whose times differ by a smaller share are equally fast.
GAIN = 0.02


def search(planner: Planner) -> list[Plan]:
    """Plans with all powers of two and with all of a process's pairs at a time, of known time.

    As many activations are kept as fit. Memory is counted for two sizes, and for others
    interpolated.
    """
    config = planner.config
    rows = -(-config.global_batch_size // planner.machine.count)
    sizes = [rows]
    size = SMALLEST
    while size < rows:
        sizes.append(size)
        size *= 2
    usual = min(unmeasured_micro_batch(config), rows)
    between = (max(1, usual // 2), usual) if usual > 1 else None
    plans = (planner.plan(replace(config, micro_batch_size=one), between) for one in sorted(sizes))
    return [plan for plan in plans if plan.step is not None]


def fastest(plans: Sequence[Plan]) -> Plan | None:
    """Of those that fit, the one to take by `largest_of_fastest`; None if none fits."""
    fitting = {unmeasured_micro_batch(plan.config): plan for plan in plans if plan.fits}
    seconds = {size: plan.step.total for size, plan in fitting.items() if plan.step is not None}
    return fitting[largest_of_fastest(seconds)] if seconds else None


def largest_of_fastest(seconds: Mapping[int, float]) -> int:
    """The largest of the sizes that are as fast as the fastest, within `GAIN`.

    It has the fewest launches. Neither a plan nor a trial has all that a step's host has to do
    besides them.
    """
    least = min(seconds.values())
    return max(size for size, value in seconds.items() if value <= (1 + GAIN) * least)


def print_search(plans: Sequence[Plan], console: Console) -> None:
    """Print a row for each size and the one to take."""
    table = Table(box=None, pad_edge=False, show_edge=False)
    for head in ("pairs at a time", "encoded once", "MiB", "a step, s", "pairs/s"):
        table.add_column(head, justify="right", no_wrap=True)
    for plan in plans:
        assert plan.step is not None
        config = plan.config
        table.add_row(
            f"{config.micro_batch_size:,}",
            f"{plan.kept} of {plan.micro_batches}" if plan.micro_batches > 1 else "all",
            f"{plan.peak / 2**20:,.0f}",
            f"{plan.step.total:.3g}",
            f"{config.global_batch_size / plan.step.total:,.0f}" if plan.fits else "does not fit",
        )
    console.print(table)
    if (best := fastest(plans)) is not None:
        console.print(f"the size to take: --micro-batch-size {best.config.micro_batch_size}")
