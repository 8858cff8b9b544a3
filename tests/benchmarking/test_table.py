from __future__ import annotations

import dataclasses

import pytest
from rich.console import Console

from megabatch.benchmarking import records, table
from megabatch.benchmarking.inputs import Case
from megabatch.benchmarking.measure import Result


def record(contender: str, b: int, ms: float, extra: int) -> records.Record:
    case = Case("clip", contender, "cpu", "float32", b=b, d=100, scale=14.3)
    return records.combine(
        case, [Result("ok", "", (ms,), (1e12, 1e12), extra, 1e-6, 0.1, 0.1)], work=8
    )


def lines(*made: records.Record) -> list[str]:
    console = Console(width=80, color_system=None)
    with console.capture() as capture:
        console.print(table.table(made))
    return [" ".join(line.split()) for line in capture.get().splitlines()[1:]]


def test_beside_the_first_of_the_same_size() -> None:
    shown = lines(
        record("megabatch", 1000, 10.0, 1 << 20),
        record("dense", 1000, 25.0, 9 << 20),
        record("dense", 2000, 1100.0, 3 << 30),
    )
    assert shown[0] == "1,000 megabatch 10.0 1.0 8% 1.0 MiB 1.0 1.0e-06"
    assert shown[1] == "1,000 dense 25.0 2.5 3% 9.0 MiB 9.0 1.0e-06"
    assert shown[2] == "2,000 dense 1,100.0 1.0 0% 3.00 GiB 1.0 1.0e-06"


def test_what_has_no_figures_says_why() -> None:
    ok = record("dense", 1000, 25.0, 9 << 20)
    gone = dataclasses.replace(
        ok, contender="megabatch", status="out of memory", ms=None, extra_bytes=None
    )
    shown = lines(gone, ok, dataclasses.replace(ok, status="wrong"))
    assert shown[0] == "1,000 megabatch out of memory"
    assert shown[1] == "1,000 dense 25.0 3% 9.0 MiB 1.0e-06"
    assert shown[2].endswith("MiB wrong")


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0.0 MiB"), (3 << 19, "1.5 MiB"), (5 << 30, "5.00 GiB")]
)
def test_size(value: int, text: str) -> None:
    assert table.size(value) == text
