"""The fastest size of micro-batches, by the plan's memory and time (`megabatch plan --search`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rich.console import Console
from rich.table import Table

from megabatch.config.settings import unmeasured_micro_batch
from megabatch.planning.plan import Plan, Planner

#: The smallest size that is tried, unless a process has fewer pairs.
SMALLEST = 128
#: A larger size must be faster by this share. (The trainer's own search takes the largest of sizes
#: that are equally fast: a plan does not count its host's time for launches.)
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
    """Of those that fit, the smallest one that is as fast as the fastest; None if none fits."""
    fitting = [(plan, plan.step.total) for plan in plans if plan.fits and plan.step is not None]
    if not fitting:
        return None
    least = min(seconds for _, seconds in fitting)
    return next(plan for plan, seconds in fitting if seconds <= (1 + GAIN) * least)


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
