"""Odd table files, and the rows of them that cannot be used."""

from __future__ import annotations

import gzip
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from megabatch.data import open_pairs
from megabatch.data.pairs import BadSample
from megabatch.data.table_files import column_names, read_columns
from megabatch.errors import UsageError

from .samples import captions, png


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for i in range(3):
        (tmp_path / f"{i}.png").write_bytes(png(i))
    return tmp_path


ODD = {
    "plain": (b"filepath,title\n0.png,a\n1.png,b\n", ["a", "b"]),
    "BOM": (b"\xef\xbb\xbffilepath,title\n0.png,a\n1.png,b\n", ["a", "b"]),
    "CRLF": (b"filepath,title\r\n0.png,a\r\n1.png,b\r\n", ["a", "b"]),
    "CR": (b"filepath,title\r0.png,a\r1.png,b\r", ["a", "b"]),
    "no last newline": (b"filepath,title\n0.png,a\n1.png,b", ["a", "b"]),
    "blank lines": (b"\nfilepath,title\n\n0.png,a\n\n\n1.png,b\n\n", ["a", "b"]),
    "quotes": (b'filepath,title\n"0.png","a ""q"", b"\n1.png,5" pipe\n', ['a "q", b', '5" pipe']),
    "newlines": (b'filepath,title\r\n0.png,"a\r\nb"\r\n1.png,c\r\n', ["a\r\nb", "c"]),
    "accents": (b"filepath,title\n0.png,caf\xc3\xa9\n1.png,b\n", ["caf\u00e9", "b"]),
    "not UTF-8": (b"filepath,title\n0.png,\xff\xfe\n1.png,b\n", ["(text is not UTF-8)", "b"]),
    "empty caption": (b"filepath,title\n0.png, \n1.png,b\n", ["(empty caption)", "b"]),
    "numbers": (b"filepath,title\n0.png,007\n1.png,1.50\n", ["007", "1.50"]),
    "a NUL": (b"filepath,title\n0.png,a\0b\n1.png,b\n", ["a\0b", "b"]),
    "other columns": (b"id,filepath,x,title\n9,0.png,,a\n8,1.png,,b\n", ["a", "b"]),
    "long": (b"filepath,title\n0.png," + b"a" * 2_000_000 + b"\n1.png,b\n", ["a" * 2_000_000, "b"]),
}  # fmt: skip


@pytest.mark.parametrize("kind", ODD)
def test_odd_text_tables_that_are_read(folder: Path, kind: str):
    data, expected = ODD[kind]
    (folder / "a.csv").write_bytes(data)
    assert captions(open_pairs(str(folder / "a.csv"))) == expected


BAD = {
    "fields": (
        b"filepath,title\n0.png,a\n1.png,b,c\n2.png,d\n3.png\n",
        ["a", "(3 fields instead of 2)", "d", "(1 field instead of 2)"],
    ),
    "an open quote": (
        b'filepath,title\n0.png,a\nx\n1.png,"b\n2.png,c\n2.png,d\n',
        ["a", "(1 field instead of 2)", "(an open quote, 2 lines are lost)"],
    ),
    "an open quote before": (
        b'title,filepath\na,0.png\n"b,1.png\nc,2.png\n',
        ["a", "(1 field instead of 2)"],
    ),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_rows_keep_their_place_and_are_counted(folder: Path, kind: str):
    data, expected = BAD[kind]
    path = folder / "a.csv"
    path.write_bytes(data)
    found = open_pairs(str(path))
    assert captions(found) == expected
    bad = [(row, text[1:-1]) for row, text in enumerate(expected, 1) if text[0] == "("]
    assert found.damage == [f"{path}: 1 x {reason} (first: row {row})" for row, reason in bad]
    with pytest.raises(BadSample, match=rf"a\.csv:row {bad[0][0]}$"):
        found[bad[0][0] - 1]


REFUSED = {
    "no bytes": (b"", "the file is empty"),
    "blank": (b"\n\n", "the file is empty"),
    "a header alone": (b"filepath,title\n", r"no rows in .*a\.csv"),
    "no header": (b"0.png,a\n1.png,b\n", r"no image column .*; its columns are '0\.png', 'a'"),
    "a space": (b"filepath, title\n0.png,a\n", "its columns are 'filepath', ' title'"),
    "twice": (b"filepath,title,title\n0.png,a,b\n", r"a\.csv has more than one column 'title'"),
    "UTF-16": ("filepath,title\n0.png,a\n".encode("utf-16"), "expected a text table in UTF-8"),
    "Excel": (b"PK\x03\x04...", "expected a text table in UTF-8"),
    "a long row": (b"filepath,title\n0.png," + b"a" * 40_000_000 + b"\n1.png,b\n", "straddl"),
    "another machine": (
        b"filepath,title\n/elsewhere/0.png,a\n",
        r"none of 1 sample tried .* unreadable image file: a\.csv:row 1, tried /elsewhere/0\.png$",
    ),
    "bad rows": (b"filepath,title\nx\ny\n", "none of 2 samples tried .* 1 field instead of 2"),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_odd_text_tables_that_are_refused_in_one_line(folder: Path, kind: str):
    data, message = REFUSED[kind]
    (folder / "a.csv").write_bytes(data)
    with pytest.raises(UsageError, match=message) as caught:
        open_pairs(str(folder / "a.csv"))
    assert "\n" not in str(caught.value)
    assert "a.csv" in str(caught.value)


@pytest.mark.parametrize("ending", ["csv", "parquet", "arrow"])
def test_a_file_whose_name_is_not_utf_8(folder: Path, ending: str):
    (folder / os.fsdecode(f"gr\xfcn.{ending}".encode("latin-1"))).write_bytes(b"filepath,title\n")
    with pytest.raises(UsageError, match=r"^cannot read .*'\\udcfc'"):
        open_pairs(str(folder))


ROWS = [b'{"image": "0.png", "text": "a"}', '{"image": "1.png", "text": "b\\nc \u6f22"}'.encode()]


def write(path: Path, lines: list[bytes]) -> Path:
    data = b"\n".join(lines)
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def texts(path: Path, **options: Any) -> tuple[list[Any], dict[int, str]]:
    table, bad = read_columns(path, ["text"], **options)
    return table["text"].to_pylist(), bad


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_json_lines(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("megabatch.data.table_files._PIECE", 2)
    odd = [b'{"a": 0, "text": 1}', b'{"text": null}', b'{"text": 0.5}', b"  ", b'{"text": ""}']
    path = write(tmp_path / name, [b"\xef\xbb\xbf" + ROWS[0] + b"\r", b"", ROWS[1], *odd])
    assert column_names(path, ",") == ["image", "text", "a"]
    table, bad = read_columns(path, ["text", "image"])
    assert table["text"].to_pylist() == ["a", "b\nc \u6f22", "1", None, "0.5", ""]
    assert table["image"].to_pylist() == ["0.png", "1.png", *[None] * 4]
    assert bad == {}


def test_lists_of_texts_where_they_are_asked_for(tmp_path: Path):
    lines = [b'{"text": ["a", 7]}', b'{"text": "b"}', b'{"text": [["c"]]}', b'{"text": null}']
    found, bad = texts(write(tmp_path / "a.jsonl", lines), lists=["text"])
    assert found == [["a", "7"], ["b"], None, None]
    assert bad == {2: "'text' holds list, not a text"}


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b'{"text": ', "no JSON object"),
        (b'{"text": "\xff"}', "no JSON object"),
        (b"[" * 100_000, "no JSON object"),
        (b"null", "no JSON object"),
        (b'{"text": ["a"]}', "'text' holds list, not a text"),
        (b'{"text": true}', "'text' holds bool, not a text"),
        (b'{"text": "\\ud800"}', "'text' is not Unicode text"),
    ],
)
def test_a_bad_line_costs_no_other(folder: Path, line: bytes, why: str):
    path = write(folder / "a.jsonl", [ROWS[0], line, line, ROWS[1]])
    pairs = open_pairs(str(path))
    assert captions(pairs) == ["a", f"({why})", f"({why})", "b\nc \u6f22"]
    assert pairs.damage == [f"{path}: 2 x {why} (first: row 2)"]


def test_a_compressed_file_that_breaks_off_is_used_up_to_there(tmp_path: Path):
    lines = [b'{"text": "%d %d"}' % (i, i**9) for i in range(50_000)]
    path = write(tmp_path / "a.jsonl.gz", lines)
    path.write_bytes(path.read_bytes()[:-100_000])
    found, bad = texts(path)
    last = len(found) - 1
    assert 1_000 < last < 50_000
    assert found == [*(f"{i} {i**9}" for i in range(last)), None]
    assert list(bad) == [last]
    assert bad[last].startswith("the file breaks off: ")


@pytest.mark.parametrize(
    ("name", "data", "why"),
    [
        ("a.jsonl", b"", "the file is empty"),
        ("a.jsonl", b"\n", "no line"),
        ("a.jsonl", b"a,b\n1,2\n", "no JSON object"),
        ("a.jsonl.gz", b"no gzip", "gzip"),
        ("a.parquet", b"", "the file is empty"),
        ("a.parquet", b"no parquet", ""),
        ("a.arrow", b"ARROW1", ""),
        ("a.arrow", b"no arrow file at all", ""),
    ],
)
def test_files_of_another_kind(tmp_path: Path, name: str, data: bytes, why: str):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(UsageError, match=rf"cannot read .*{name}: .*{why}"):
        open_pairs(str(tmp_path / name))


def test_the_file_format_of_arrow(tmp_path: Path):  # other tests have the stream format
    table = pa.table({"text": ["a", "b"]})
    with pa.ipc.new_file(tmp_path / "a.arrow", table.schema) as writer:
        writer.write_table(table)
    assert column_names(tmp_path / "a.arrow", ",") == ["text"]
    assert texts(tmp_path / "a.arrow") == (["a", "b"], {})
