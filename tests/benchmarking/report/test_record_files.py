from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megabatch.benchmarking.report.record_files import RecordFile, place, read
from megabatch.errors import UsageError

H200 = "NVIDIA H200"


def made(**content: Any) -> RecordFile:
    return RecordFile(Path("one.json"), content)


def test_a_file_says_where_its_figures_come_from() -> None:
    machine = {"cpu": "AMD EPYC", "cores": 2, "gpus": [H200, H200]}
    versions = {"torch": "2.11.0+cu132", "numpy": "2"}
    file = made(machine=machine, versions=versions, commit="abc1234", date="2026-11-21T08:02:10")
    assert file.origin == "2 x NVIDIA H200, torch 2.11.0, commit abc1234, 2026-11-21"
    assert made(records=[{"date": "2026-11-20T1"}, {"date": "2026-11-22T1"}]).date == "2026-11-22"
    assert made().origin == ""


def test_machines() -> None:
    assert place({"cpu": "AMD EPYC", "cores": 2, "gpus": [H200]}) == H200
    assert place({"cpu": "AMD EPYC", "cores": 2, "gpus": []}) == "AMD EPYC, 2 cores"
    assert place("x86_64, 2 cores") == "x86_64, 2 cores"
    assert place({}) == ""


def test_commands_are_the_records_own_where_several_calls_wrote_a_file() -> None:
    own = [{"command": "a"}, {"command": "b"}, {"command": "a"}]
    assert made(command="b", records=own).commands == ["a", "b"]
    assert made(records=own).commands == ["a", "b"]
    assert made(command="all of it", records=own).commands == ["all of it"]
    assert made(command="c", records=[{}]).commands == ["c"]
    assert made(commands=["a", "b"]).commands == ["a", "b"]
    assert made().commands == []


def test_skipped_records_are_not_measured() -> None:
    records = [{"status": "ok"}, {"status": "skipped"}, {"status": "wrong"}, {}]
    assert made(records=records).measured == [records[0], records[2], records[3]]


def test_files_are_read_by_name(tmp_path: Path) -> None:
    (tmp_path / "b.json").write_text(json.dumps({"records": [{"ms": 1}]}))
    (tmp_path / "a.json").write_text(json.dumps([{"ms": 2}]))
    (tmp_path / "c.png").touch()
    files = read(tmp_path)
    assert list(files) == ["a", "b"]
    assert [file.records for file in files.values()] == [[{"ms": 2}], [{"ms": 1}]]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("{", "cannot be read as JSON"),
        ("1", "has a int"),
        ("[1]", "`records` is not a list of objects"),
        ('{"records": 1}', "`records` is not a list of objects"),
    ],
)
def test_a_file_that_holds_no_records(tmp_path: Path, content: str, expected: str) -> None:
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(UsageError, match=rf"a\.json: .*{expected}"):
        read(tmp_path)


def test_a_folder_without_records(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--results .*: has no JSON file"):
        read(tmp_path)
