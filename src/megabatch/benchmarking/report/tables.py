"""Markdown tables, and how numbers look in them: three significant digits, with their unit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megabatch.benchmarking.report.record_files import Record

NONE = "-"  #: a figure that was not measured


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A Markdown table's lines, with an empty one after them."""
    lines = [head, ["---"] * len(head), *rows]
    return [f"| {' | '.join(line)} |" for line in lines] + [""]


def digits(value: float) -> str:
    """Three significant digits, more before the decimal point."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:#.3g}"


def seconds(value: float | None) -> str:
    """Seconds, or milliseconds below one."""
    if value is None:
        return NONE
    return f"{digits(value)} s" if value >= 0.9995 else f"{digits(1e3 * value)} ms"


def milliseconds(value: float | None) -> str:
    """Milliseconds, or seconds from a thousand on."""
    return NONE if value is None else seconds(value / 1e3)


def gib(value: float | None) -> str:
    """Bytes in GiB."""
    return NONE if value is None else f"{digits(value / 2**30)} GiB"


def share(value: float | None) -> str:
    """A share in per cent."""
    return NONE if value is None else f"{value:.1%}"


def count(value: float | None, unit: str = "") -> str:
    """A whole number."""
    return NONE if value is None else f"{value:,.0f} {unit}".rstrip()


def times(value: float) -> str:
    """A ratio."""
    return f"{digits(value)} times"


def error(value: float | None) -> str:
    """A relative error: two digits."""
    if value is None:
        return NONE
    if value == 0:
        return "0"
    mantissa, _, exponent = f"{value:.1e}".partition("e")
    return f"{value:.2g}" if value >= 0.1 else f"{mantissa}e{int(exponent)}"


def pick(records: Sequence[Record], **wanted: object) -> Record | None:
    """The first record with these values of its fields."""
    return next((r for r in records if all(r.get(k) == v for k, v in wanted.items())), None)


def value(records: Sequence[Record], field: str, **wanted: object) -> float | None:
    """A field of the first such record; None if there is none, or it has no such figure."""
    found = pick(records, **wanted)
    return None if found is None else found.get(field)


def grouped(
    found: Sequence[Record], *names: str
) -> Iterator[tuple[tuple[object, ...], list[Record]]]:
    """Records with equal values of these fields, in the order in which they first occur."""
    groups: dict[tuple[object, ...], list[Record]] = {}
    for record in found:
        groups.setdefault(tuple(record[name] for name in names), []).append(record)
    yield from groups.items()
