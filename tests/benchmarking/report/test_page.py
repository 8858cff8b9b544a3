from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from megabatch.benchmarking.report.page import Answer, Part, Section, render
from megabatch.benchmarking.report.record_files import RecordFile
from megabatch.errors import UsageError


def total(files: Sequence[RecordFile]) -> Iterator[str]:
    yield f"in all {sum(r['ms'] for file in files for r in file.records)} ms"


def times(file: RecordFile) -> str:
    return f"{file.records[0]['ms']} ms"


SECTIONS = (
    Section(
        "How fast?",
        (
            Part("All runs", ("run-*",), total, "Alone.", (("run-1.png", "a plot"),)),
            Part("None", ("other",), total),
        ),
        (Answer("Time", ("run-1",), times), Answer("Both", ("run-1", "run-2"), lambda a, b: "x")),
    ),
    Section("What else?", (Part("Else", ("other",), total),)),
)


def files(folder: Path, **contents: float) -> dict[str, RecordFile]:
    return {
        name.replace("_", "-"): RecordFile(
            folder / f"{name.replace('_', '-')}.json",
            {"command": f"make {name}", "date": "2026-11-21T1", "records": [{"ms": ms}]},
        )
        for name, ms in contents.items()
    }


def test_a_page(tmp_path: Path) -> None:
    found = files(tmp_path / "results", run_1=2, strange=3)
    page = render(found, tmp_path / "docs", SECTIONS, "An introduction.")
    assert page == (
        "# Results\n\nAn introduction.\n\n"
        "| question | measured |\n| --- | --- |\n| [Time](#how-fast) | 2 ms |\n\n"
        "## How fast?\n\n### All runs\n\nAlone. Record: [run-1](../results/run-1.json).\n\n"
        "in all 2 ms\n\nWhere these figures come from:\n\n"
        "- [run-1.json](../results/run-1.json): 2026-11-21.\n  `make run_1`\n\n"
        "## Further records\n\nIn no table above:\n\n"
        "- [strange.json](../results/strange.json): 2026-11-21.\n  `make strange`\n"
    )


def test_sections_parts_and_answers_appear_with_their_records(tmp_path: Path) -> None:
    page = render(files(tmp_path, run_1=1, run_2=2, other=4), tmp_path, SECTIONS, "")
    headings = [line for line in page.splitlines() if line.startswith("#")]
    assert headings == [
        "# Results",
        "## How fast?",
        "### All runs",
        "### None",
        "## What else?",
        "### Else",
    ]
    assert "Records: [run-1](run-1.json), [run-2](run-2.json)." in page
    assert "in all 3 ms" in page
    assert "| [Both](#how-fast) | x |" in page


def test_figures_appear_where_they_exist(tmp_path: Path) -> None:
    (tmp_path / "run-1.png").touch()
    page = render(files(tmp_path, run_1=1), tmp_path / "docs", SECTIONS, "")
    assert "![a plot](../run-1.png)" in page


def test_a_record_of_another_kind_is_named(tmp_path: Path) -> None:
    found = {"run-1": RecordFile(tmp_path / "run-1.json", {"records": [{"b": 1}]})}
    with pytest.raises(UsageError, match=r"run-1\.json: .*not those of the benchmark.*'ms'"):
        render(found, tmp_path, SECTIONS, "")


def test_notes_and_lost_scripts_are_said(tmp_path: Path) -> None:
    content = {"note": "On a busy machine.", "script": "not kept", "records": []}
    page = render({"odd": RecordFile(tmp_path / "odd.json", content)}, tmp_path, SECTIONS, "")
    assert page.endswith("- [odd.json](odd.json). On a busy machine.\n  The script: not kept.\n")
