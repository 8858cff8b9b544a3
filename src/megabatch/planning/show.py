"""A plan as a table and as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from megabatch.errors import plural
from megabatch.planning.plan import PHASES, Plan
from megabatch.planning.seconds import StepSeconds
from megabatch.planning.simulation.hardware import DATASHEETS, MEASURED, datasheet


def print_plan(plan: Plan, console: Console) -> None:
    """Print a table with a row for each part and a column for each phase; not the problem."""
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
    if not console.is_terminal:
        console.width = max(console.width, 120)  # in a file, keep notes on their lines
    console.print(table)
    for part in plan.host:
        free = "" if machine.host is None else f" of {_mega(machine.host)} free"
        size = _mega(max(part.nbytes.values()))
        console.print(f"on the host: {part.name} {size} MiB{free} ({part.note})")
    for note in plan.notes:
        console.print(note)
    if plan.step is not None:
        print_seconds(plan, plan.step, console)
    elif plan.seconds is not None:
        console.print(f"the loss takes about {plan.seconds:.3g} s a step")


def print_seconds(plan: Plan, step: StepSeconds, console: Console) -> None:
    """Print the time of a step by part in one line."""
    parts = ", ".join(f"{name} {_seconds(value)}" for name, value in seconds_by_part(step).items())
    rate = plan.config.global_batch_size / step.total
    measured = datasheet(plan.machine.name) is DATASHEETS[MEASURED]
    known = "" if measured else ", by its datasheet"
    console.print(
        f"a step takes about {step.total:.3g} s, {rate:,.0f} pairs/s{known} ({parts}); reading and "
        "decoding data are not counted"
    )


def seconds_by_part(step: StepSeconds) -> dict[str, float]:
    """The parts' seconds by their names for users."""
    return {name.replace("_", " "): value for name, value in vars(step).items() if value}


def to_json(plan: Plan) -> dict[str, Any]:
    """The plan for JSON, with all sizes in bytes."""
    return {
        "model": plan.config.model,
        "global_batch_size": plan.config.global_batch_size,
        "micro_batch_size": plan.config.micro_batch_size,
        "machine": asdict(plan.machine),
        "parts": [asdict(part) for part in plan.parts],
        "host": [asdict(part) for part in plan.host],
        "phases": {phase: plan.total(phase) for phase in PHASES},
        "peak": plan.peak,
        "fits": plan.fits,
        "problem": plan.problem,
        "notes": list(plan.notes),
        "loss_seconds": plan.seconds,
        "kept_micro_batches": plan.kept,
        "step": None
        if plan.step is None
        else {
            "seconds": plan.step.total,
            "pairs_per_second": plan.config.global_batch_size / plan.step.total,
            "parts": asdict(plan.step),
        },
    }


def _mega(size: int) -> str:
    return f"{size / 2**20:,.{0 if size >= 100 << 20 else 1}f}"


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 1 else f"{1e3 * value:.3g} ms"
