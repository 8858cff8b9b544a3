"""The pages of results: the committed ones show tables and figures of every kind."""

from __future__ import annotations

import re
from typing import Any

import pytest

import page


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


#: Three seeds of a loss, and of figures that are near each other.
FILES: dict[str, Any] = {
    "b": {
        "records": [{"seed": k, "kind": "r", "loss": 1.0 + k, "near": 9.0 + k} for k in range(3)],
    },
}


def table(text: str) -> list[list[str]]:
    lines = page.table(text, FILES).splitlines()
    return [line[1:-1].split("|") for line in lines if line.startswith("|")]


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


def test_a_record_of_other_sources_is_marked() -> None:
    hashes = {"losses": page.digest(page.PACKAGE / "losses"), "similarity": "0", "gone": "1"}
    *_, line = page.sources({"c": {"command": "x.py", "sources": hashes}}).splitlines()
    marked = "- [c](../benchmarks/results/c.json): `x.py`, *changed since: similarity, gone*"
    assert (line, page.unmarked(line)) == (marked, marked.partition(", *")[0])
