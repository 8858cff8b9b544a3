"""The pages of results: the committed ones, and tables and figures of made-up records."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
import page  # noqa: E402 - needs the path


@pytest.fixture(scope="module")
def committed() -> dict[str, Any]:
    return page.read(page.RESULTS)


def test_the_committed_pages_are_of_the_committed_records(committed: dict[str, Any]) -> None:
    for path, text in page.pages(committed).items():
        shown = page.unmarked(path.read_text("utf-8"))
        assert page.unmarked(text) == shown, f"{path}: python benchmarks/page.py writes it anew"


def test_every_committed_record_is_listed(committed: dict[str, Any]) -> None:
    listed = re.findall(r"^- \[(\S+)\]", (page.DOCS / "appendix.md").read_text("utf-8"), re.M)
    assert listed == list(committed)


def one(contender: str, b: int, ms: float | None, **more: Any) -> dict[str, Any]:
    return {"contender": contender, "b": b, "ms": ms, **more}


FILES: dict[str, Any] = {
    "a": {
        "command": "python measure.py --all",
        "machine": {"gpus": ["H", "H"]},
        "date": "2026-01-02T03",
        "records": [
            one("ours", 65536, 40.0, parts={"x": 2.0}, bytes=2**30),
            one("theirs", 65536, None, status="out of memory"),
            one("ours", 1024, 0.5, status="ok", parts=None, bytes=2**29),
            one("theirs", 1024, 1234.0),
            one("absent", 1024, None, status="not installed"),
        ],
    },
    "b": {
        "total": 3,
        "records": [{"seed": k, "kind": "r", "loss": 1.0 + k, "near": 9.0 + k} for k in range(3)],
    },
}


def table(text: str) -> list[list[str]]:
    lines = page.table(text, FILES).splitlines()
    return [line[1:-1].split("|") for line in lines if line.startswith("|")]


def test_a_table_of_columns() -> None:
    made = table(
        'records = ["a"]\nwhere = {contender = "ours"}\nrow = "{b:,}"\nhead = "pairs"\n'
        'columns = {time = "{ms:ms}", memory = "{bytes:GiB}", x = "{parts[x]:s}"}'
    )
    assert made[0] == ["pairs", "time", "memory", "x"]
    assert made[2:] == [
        ["65,536", "40.0 ms", "1.00 GiB", "2.00 s"],
        ["1,024", "0.500 ms", "0.500 GiB", "-"],
    ]


def test_a_table_of_sizes() -> None:
    made = table('records = ["a"]\nrow = "{contender}"\ncolumn = "{b:,} pairs"\ncell = "{ms:ms}"')
    assert made[0][-2:] == ["1,024 pairs", "65,536 pairs"]
    assert made[2:] == [["ours", "0.500 ms", "40.0 ms"], ["theirs", "1.23 s", "out of memory"]]


SEEDS = 'records = ["b"]\nrow = "{kind}"\ncolumns = {loss = "{loss:.1f}"}\n'


def test_several_records_of_a_cell() -> None:
    near = SEEDS.replace("{loss:", "{near:")
    assert table(near + 'several = "mean"')[2] == ["r", "10.0 ± 1.0"]
    assert table(SEEDS + 'several = "mean"')[2] == ["r", "1.0, 2.0, 3.0"]  # scattered
    assert table(SEEDS + 'several = "first"')[2] == ["r", "1.0"]
    assert table(SEEDS + "unless = {seed = [0, 1]}")[2] == ["r", "3.0"]
    with pytest.raises(ValueError, match="3 records for r"):
        table(SEEDS)
    with pytest.raises(ValueError, match="no record for the table"):
        table(SEEDS + "where = {seed = 9}")


def test_a_field_that_equals_another_and_lines_in_order() -> None:
    records = [{"b": b, "group": group} for b, group in ((2048, 2048), (4096, 128), (512, 512))]
    made = page.table(
        'records = ["c"]\nwhere = {group = "=b"}\nsort = true\nrow = "{b:,} pairs"\ncolumns = {}',
        {"c": {"records": records}},
    )
    assert [line for line in made.splitlines() if "pairs" in line] == [
        "|512 pairs|",
        "|2,048 pairs|",
    ]


def test_figures_in_the_text() -> None:
    text = 'takes {{a: contender="ours" b=1024: {ms:ms} and {bytes:GiB}}}, {{b:: {total} in all}}.'
    assert page.render(text, FILES) == "takes 0.500 ms and 0.500 GiB, 3 in all."
    with pytest.raises(ValueError, match="no record of a"):
        page.render('{{a: contender="none": {ms:ms}}}', FILES)


def test_sources() -> None:
    lines = page.sources(FILES).splitlines()
    assert lines[6:] == [
        "- [a](../benchmarks/results/a.json): 2 x H, 2026-01-02, `measure.py`",
        "- [b](../benchmarks/results/b.json): a script that was not kept",
    ]


def test_a_record_of_other_sources_is_marked() -> None:
    hashes = {"losses": page.digest(page.PACKAGE / "losses"), "similarity": "0", "gone": "1"}
    *_, line = page.sources({"c": {"command": "x.py", "sources": hashes}}).splitlines()
    marked = "- [c](../benchmarks/results/c.json): `x.py`, *changed since: similarity, gone*"
    assert (line, page.unmarked(line)) == (marked, marked.partition(", *")[0])


@pytest.mark.parametrize(
    ("value", "unit", "shown"),
    [
        (0.00314, "error", "3.1e-3"),
        (0.0, "error", "0"),
        (0.314, "error", "0.31"),
        (123.4, "digits", "123"),
        (1234.5, "ms", "1.23 s"),
        (0.1234, "%", "12.3%"),
        (2, "GPUs", "2 GPUs"),
        (None, "ms", "-"),
    ],
)
def test_units(value: Any, unit: str, shown: str) -> None:
    assert page.fill(f"{{v:{unit}}}", [{"v": value}]) == shown
