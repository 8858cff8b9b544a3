from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from megabatch.data.table_files import column_names, read_columns
from megabatch.data.tables import Wanted, open_tables
from megabatch.errors import UsageError

ROWS = [
    {"image": f"{i}.png", "text": text} for i, text in enumerate(["a", "b\nc", "caf\u00e9 \u6f22"])
]


def write(path: Path, rows: list[Any]) -> Path:
    data = b"".join(
        (row if isinstance(row, bytes) else json.dumps(row).encode()) + b"\n" for row in rows
    )
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def texts(path: Path) -> tuple[list[Any], list[str]]:
    columns, _, damage = read_columns(path, ["text"])
    return columns["text"].to_pylist(), damage


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_columns(tmp_path: Path, name: str):
    path = write(tmp_path / name, ROWS)
    assert column_names(path, ",") == ["image", "text"]
    columns, left_out, damage = read_columns(path, ["text", "image"])
    assert columns["text"].to_pylist() == [row["text"] for row in ROWS]
    assert columns["image"].to_pylist() == ["0.png", "1.png", "2.png"]
    assert damage == []
    assert left_out.tolist() == []


def test_lists_of_texts_where_they_are_asked_for(tmp_path: Path):
    rows = [{"text": ["a", 7]}, b"", {"text": "b"}, b"no", {"text": [["c"]]}, {"text": None}]
    columns, left_out, damage = read_columns(
        write(tmp_path / "a.jsonl", rows), ["text"], lists=["text"]
    )
    assert columns["text"].to_pylist() == [["a", "7"], ["b"], None]
    assert left_out.tolist() == [1, 3, 4]
    assert "2 lines left out, the first is line 4: no JSON object" in damage[0]


def test_names_are_those_of_all_lines_in_order(tmp_path: Path):
    path = write(tmp_path / "a.jsonl", [{"b": 1}, b"", {"c": 1, "b": 2}, {"a": 0}])
    assert column_names(path, ",") == ["b", "c", "a"]


def test_what_a_line_lacks_is_null_and_numbers_are_texts(tmp_path: Path):
    rows = [{"image": "x"}, {"text": None}, {"text": 7}, {"text": 0.5}, b"  ", {"text": ""}]
    assert texts(write(tmp_path / "a.jsonl", rows)) == ([None, None, "7", "0.5", ""], [])


def test_a_byte_order_mark_and_windows_lines(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n{"text": "b"}')
    assert texts(path) == (["a", "b"], [])


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b'{"text": ', "no JSON object"),
        (b'{"text": "\xff"}', "no JSON object"),
        (b"[" * 100_000, "no JSON object"),
        (b'["a"]', "no JSON object"),
        (b"null", "no JSON object"),
        (b'{"text": ["a"]}', "'text' holds list, not a text"),
        (b'{"text": {}}', "'text' holds dict, not a text"),
        (b'{"text": true}', "'text' holds bool, not a text"),
        (b'{"text": "\\ud800"}', "'text' is not Unicode text"),
    ],
)
def test_a_bad_line_costs_no_other(tmp_path: Path, line: bytes, why: str):
    path = write(tmp_path / "a.jsonl", [ROWS[0], line, line, ROWS[1]])
    damage = f"{path}: 2 lines left out, the first is line 2: {why}"
    assert texts(path) == (["a", "b\nc"], [damage])


def test_a_compressed_file_that_breaks_off_is_used_up_to_there(tmp_path: Path):
    rows = [{"text": f"{i} {i**9}"} for i in range(50_000)]
    path = write(tmp_path / "a.jsonl.gz", rows)
    path.write_bytes(path.read_bytes()[:-100_000])
    found, (damage,) = texts(path)
    assert 1_000 < len(found) < 50_000
    assert found == [row["text"] for row in rows[: len(found)]]
    broken = f"{path}: 1 line left out, the first is line {len(found) + 1}: breaks off: "
    assert damage.startswith(broken)


def test_more_rows_than_are_packed_at_a_time(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("megabatch.data.table_files._PIECE", 2)
    assert texts(write(tmp_path / "a.jsonl", [{"text": i} for i in range(5)]))[0] == [*"01234"]


@pytest.mark.parametrize(
    ("name", "data", "why"),
    [
        ("a.jsonl", b"", "no line in it"),
        ("a.jsonl", b"a,b\n1,2\n", "line 2: no JSON object"),
        ("a.jsonl.gz", b"no gzip", "gzip"),
    ],
)
def test_files_of_another_kind(tmp_path: Path, name: str, data: bytes, why: str):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(UsageError, match=rf"cannot read .*{name}: .*{why}"):
        column_names(tmp_path / name, ",")


def test_where_no_line_is_usable_it_says_why(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"query": "a", "text": ["b", "c"]}\n' * 3)
    why = r"no rows in .*a\.jsonl; .* 3 lines left out, the first is line 1: 'text' holds list"
    with pytest.raises(UsageError, match=why):
        open_tables([path], Wanted())


def test_a_folder_in_its_place(tmp_path: Path):
    (tmp_path / "a.jsonl").mkdir()
    with pytest.raises(UsageError, match="cannot read"):
        column_names(tmp_path / "a.jsonl", ",")
