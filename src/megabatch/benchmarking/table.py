"""Records as a table on the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from megabatch.benchmarking.records import Record


def table(records: Sequence[Record]) -> Table:
    """One line a record; times and memory beside the first contender's of the same size."""
    made = Table(box=None, padding=(0, 1), header_style="bold")
    made.add_column("b", justify="right")
    made.add_column("contender", no_wrap=True)
    for column in ("ms", "×", "of product", "extra memory", "×", "row error"):
        made.add_column(column, justify="right", no_wrap=True)
    for record in records:
        first = next(r for r in records if r.b == record.b)
        made.add_row(f"{record.b:,}", record.contender, *_cells(record, first))
    return made


def _cells(record: Record, first: Record) -> tuple[str, ...]:
    if record.ms is None or record.fraction is None or record.extra_bytes is None:
        return (f"[red]{record.status}", "", "", "", "", "")
    error = "[red]wrong" if record.status == "wrong" else f"{record.max_row_error:.1e}"
    return (
        f"{record.ms:,.1f}",
        _times(record.ms, first.ms),
        f"{record.fraction:.0%}",
        size(record.extra_bytes),
        _times(record.extra_bytes, first.extra_bytes),
        error,
    )


def _times(value: float, first: float | None) -> str:
    return f"{value / first:.1f}" if first else ""


def size(value: float) -> str:
    """Bytes in MiB or GiB."""
    return f"{value / 2**30:,.2f} GiB" if value >= 2**30 else f"{value / 2**20:,.1f} MiB"
