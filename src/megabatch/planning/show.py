"""A plan as a table."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from megabatch.errors import plural
from megabatch.options import is_reference
from megabatch.planning.machine import DATASHEETS, datasheet
from megabatch.planning.plan import PHASES, Plan


def print_plan(plan: Plan, console: Console) -> None:
    """Print a plan, with a row for each part and a column for each phase, and whether it fits."""
    if not console.is_terminal:
        console.width = max(console.width, 120)  # in a file, keep notes on their lines
    console.print(_table(plan))
    machine, config = plan.machine, plan.config
    for part in plan.host:
        free = "" if machine.host is None else f" of {_mega(machine.host)} free"
        size = _mega(part.nbytes[PHASES[0]])
        console.print(f"on the host: {part.name} {size} MiB{free} ({part.note})")
    for note in plan.notes:
        console.print(note)
    if plan.step is not None:
        parts = ", ".join(f"{name} {_seconds(taken)}" for name, taken in plan.step.items() if taken)
        measured = datasheet(machine.name) is DATASHEETS["H200"]
        seconds = sum(plan.step.values())
        console.print(
            f"a step takes about {seconds:.3g} s, {config.global_batch_size / seconds:,.0f} pairs/s"
            f"{'' if measured else ', by its datasheet'} ({parts}); reading and decoding data are "
            "not counted"
        )
    if plan.largest_batch is not None:
        console.print(f"the largest batch that fits has about {plural(plan.largest_batch, 'pair')}")
    unknown = f" without {config.loss}, whose memory is unknown" * is_reference(config.loss)
    console.print(plan.problem or f"fits{unknown}")


def _table(plan: Plan) -> Table:
    machine, config = plan.machine, plan.config
    rows = -(-config.global_batch_size // machine.count)
    device = (machine.name or "GPU") if machine.device == "cuda" else "process on the CPU"
    shares = f", {rows:,} on each of {machine.count}" if machine.count > 1 else ""
    title = (
        f"plan: {config.model}, {plural(config.global_batch_size, 'pair')} a step{shares} "
        f"({device}), {config.micro_batch_size:,} at a time"
    )
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, show_edge=False)
    table.add_column("MiB", no_wrap=True)
    for phase in PHASES:
        table.add_column(phase, justify="right", no_wrap=True)
    table.add_column("")
    for part in plan.parts:
        cells = (_mega(part.nbytes[p]) if p in part.nbytes else "" for p in PHASES)
        table.add_row(part.name, *cells, part.note)
    table.add_section()
    table.add_row("all", *(_mega(plan.total(p)) for p in PHASES), f"of {_mega(machine.limit)} free")
    return table


def _mega(size: int) -> str:
    return f"{size / 2**20:,.{0 if size >= 100 << 20 else 1}f}"


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 1 else f"{1e3 * value:.3g} ms"
