"""Odd tables: training and evaluation read them in the same way."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest

from megabatch.data import open_pairs
from megabatch.data.pairs import BadSample
from megabatch.errors import UsageError
from megabatch.evaluation.captions import open_captioned

from .samples import png

Open = Callable[..., Any]


@pytest.fixture(params=["training", "evaluation"])
def opened(request: pytest.FixtureRequest) -> Open:
    return open_pairs if request.param == "training" else open_captioned


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for i in range(3):
        (tmp_path / f"{i}.png").write_bytes(png(i))
    return tmp_path


def captions(data: Any) -> list[str]:
    """The caption of each sample, or the reason why it is bad."""
    found = []
    for i in range(len(data)):
        try:
            sample = data[i]
        except BadSample as bad:
            found.append(f"({bad.reason})")
        else:
            found.append(sample.caption if hasattr(sample, "caption") else ", ".join(sample.target))
    return found


ODD = {
    "plain": (b"filepath,title\n0.png,a\n1.png,b\n", ["a", "b"]),
    "BOM": (b"\xef\xbb\xbffilepath,title\n0.png,a\n1.png,b\n", ["a", "b"]),
    "CRLF": (b"filepath,title\r\n0.png,a\r\n1.png,b\r\n", ["a", "b"]),
    "CR": (b"filepath,title\r0.png,a\r1.png,b\r", ["a", "b"]),
    "no last newline": (b"filepath,title\n0.png,a\n1.png,b", ["a", "b"]),
    "blank lines": (b"\nfilepath,title\n\n0.png,a\n\n\n1.png,b\n\n", ["a", "b"]),
    "quotes": (b'filepath,title\n"0.png","a ""q"", b"\n1.png,5" pipe\n', ['a "q", b', '5" pipe']),
    "accents": (b"filepath,title\n0.png,caf\xc3\xa9\n1.png,b\n", ["caf\u00e9", "b"]),
    "empty caption": (b"filepath,title\n0.png, \n1.png,b\n", ["(empty caption)", "b"]),
    "numbers": (b"filepath,title\n0.png,007\n1.png,1.50\n", ["007", "1.50"]),
    "a NUL": (b"filepath,title\n0.png,a\0b\n1.png,b\n", ["a\0b", "b"]),
    "other columns": (b"id,filepath,x,title\n9,0.png,,a\n8,1.png,,b\n", ["a", "b"]),
    "long": (b"filepath,title\n0.png," + b"a" * 2_000_000 + b"\n1.png,b\n", ["a" * 2_000_000, "b"]),
}  # fmt: skip


@pytest.mark.parametrize("kind", ODD)
def test_odd_files_that_are_read(opened: Open, folder: Path, kind: str):
    data, expected = ODD[kind]
    (folder / "a.csv").write_bytes(data)
    assert captions(opened(str(folder / "a.csv"))) == expected


def test_lines_within_quotes(opened: Open, folder: Path):
    (folder / "a.csv").write_bytes(b'filepath,title\r\n0.png,"a\r\nb"\r\n1.png,c\r\n')
    assert captions(opened(str(folder / "a.csv"))) == ["a\r\nb", "c"]


@pytest.mark.parametrize(
    ("name", "between", "separator"),
    [
        ("a.csv", ";", ";"),
        ("a.csv", "\t", "\t"),
        ("a.csv", "\t", "\\t"),
        ("a.csv", "\t", None),
        ("a.tsv", "\t", None),
        ("a.tsv", ",", None),
    ],
)
def test_separators(opened: Open, folder: Path, name: str, between: str, separator: str | None):
    (folder / name).write_text(f"filepath{between}title\n0.png{between}a b\n")
    assert captions(opened(str(folder / name), separator=separator)) == ["a b"]
    with pytest.raises(UsageError, match=r"has no image column .*; its columns are 'filepath.*tit"):
        opened(str(folder / name), separator="|")


def test_paths_relative_to_the_working_directory(
    opened: Open, folder: Path, monkeypatch: pytest.MonkeyPatch
):
    (folder / "tables").mkdir()
    (folder / "tables" / "a.csv").write_text("filepath,title\n0.png,a\n1.png,b\n9.png,c\n")
    monkeypatch.chdir(folder)
    data = opened("tables/a.csv")
    assert captions(data) == ["a", "b", "(missing image file)"]
    monkeypatch.chdir("/")
    with pytest.raises(UsageError, match=r"none of its image files exists: '0\.png', tried "):
        opened(str(folder / "tables" / "a.csv"))


LEFT_OUT = {
    "fields": (
        b"filepath,title\n0.png,a\n1.png,b,c\n2.png,d\n3.png\n",
        "2 rows left out, the first (row 2) has 3 fields instead of 2: '1.png,b,c'",
        ["a", "d"],
    ),
    "an open quote": (
        b'filepath,title\n0.png,a\n1.png,"b\n2.png,c\n2.png,d\n',
        "row 2 and 2 lines after it are left out: a quote is never closed",
        ["a"],
    ),
    "an open quote before": (
        b'title,filepath\na,0.png\n"b,1.png\nc,2.png\n',
        "1 row left out, the first (row 2) has 1 field instead of 2: '\"b,1.png\\nc,2.png'",
        ["a"],
    ),
}


@pytest.mark.parametrize("kind", LEFT_OUT)
def test_what_is_left_out_is_counted_and_its_row_named(opened: Open, folder: Path, kind: str):
    data, damage, expected = LEFT_OUT[kind]
    (folder / "a.csv").write_bytes(data)
    found = opened(str(folder / "a.csv"))
    assert captions(found) == expected
    assert found.damage == [f"{folder / 'a.csv'}: {damage}"]


def test_rows_are_numbered_as_in_the_file(opened: Open, folder: Path):
    (folder / "a.csv").write_bytes(b"filepath,title\nx\n0.png,a\n\nx\nx\n9.png,b\n")
    data = opened(str(folder / "a.csv"))
    assert data[0].key == "a.csv:row 2"
    with pytest.raises(BadSample, match=r"missing image file: a\.csv:row 5, tried "):
        data[1]
    (folder / "a.jsonl").write_text('no\n\n{"image": "0.png", "text": "a"}\n[]\n{"text": "b"}\n')
    data = opened(str(folder / "a.jsonl"))
    assert data[0].key == "a.jsonl:row 3"
    with pytest.raises(BadSample, match=r"no image: a\.jsonl:row 5"):
        data[1]


REFUSED = {
    "no bytes": (b"", r"cannot read .*a\.csv: the file is empty \(0 bytes\)"),
    "blank": (b"\n\n", r"cannot read .*a\.csv: the file is empty \(2 bytes\)"),
    "a header alone": (b"filepath,title\n", r"no rows in .*a\.csv"),
    "no header": (b"0.png,a\n1.png,b\n", r"no image column .*; its columns are '0\.png', 'a'"),
    "no caption": (
        b"filepath,alt\n0.png,a\n",
        r"no caption column 'title' or 'caption' or 'text'; its columns are 'filepath', 'alt' "
        r"\(--csv-caption-key names it\)",
    ),
    "a space": (b"filepath, title\n0.png,a\n", "its columns are 'filepath', ' title'"),
    "twice": (b"filepath,title,title\n0.png,a,b\n", r"a\.csv has more than one column 'title'"),
    "UTF-16": ("filepath,title\n0.png,a\n".encode("utf-16"), "expected a text table in UTF-8"),
    "Excel": (b"PK\x03\x04...", "expected a text table in UTF-8"),
    "compressed": (b"\x1f\x8b\x08...", "expected a text table in UTF-8"),
    "another machine": (b"filepath,title\n/elsewhere/0.png,a\n", r"tried /elsewhere/0\.png$"),
    "URLs": (b"filepath,title\nhttps://a/0.png,a\n", "'https://a/0.png', a URL, and nothing is"),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_odd_files_that_are_refused_in_one_line(opened: Open, folder: Path, kind: str):
    data, message = REFUSED[kind]
    (folder / "a.csv").write_bytes(data)
    with pytest.raises(UsageError, match=message) as caught:
        opened(str(folder / "a.csv"))
    assert "\n" not in str(caught.value)
    assert "a.csv" in str(caught.value)


@pytest.mark.parametrize("ending", ["csv", "parquet", "arrow"])
def test_a_file_whose_name_is_not_utf_8(opened: Open, folder: Path, ending: str):
    (folder / os.fsdecode(f"gr\xfcn.{ending}".encode("latin-1"))).write_bytes(b"filepath,title\n")
    with pytest.raises(UsageError, match=r"^cannot read .*'\\udcfc'"):
        opened(str(folder))


def test_a_row_that_takes_too_much_memory(
    opened: Open, folder: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("megabatch.data.table_files._BLOCK", 1 << 20)
    (folder / "a.csv").write_bytes(b'filepath,title\n0.png,a\n1.png,"' + b"x,y\n" * 1_000_000)
    with pytest.raises(UsageError, match=r"cannot read .*a\.csv: straddling object"):
        opened(str(folder / "a.csv"))


@pytest.mark.parametrize("separator", ["::", "", "\u00e9"])
def test_a_separator_of_another_length(opened: Open, folder: Path, separator: str):
    (folder / "a.csv").write_bytes(ODD["plain"][0])
    with pytest.raises(UsageError, match=r"--csv-separator '.*': expected one character"):
        opened(str(folder / "a.csv"), separator=separator)


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl", "a.arrow", "a.jsonl.gz"])
def test_empty_files_of_every_kind(opened: Open, folder: Path, name: str):
    (folder / name).write_bytes(b"")
    with pytest.raises(UsageError, match=rf"cannot read .*{name}"):
        opened(str(folder / name))


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl"])
def test_missing_files_of_other_kinds(opened: Open, folder: Path, name: str):
    rows = [{"image": f"{9 - i}.png", "text": f"caption {i}"} for i in range(3)]
    if name == "a.parquet":
        pa.parquet.write_table(pa.Table.from_pylist(rows), folder / name)
    else:
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(UsageError, match=rf"{name}: none of its image .* '9\.png', tried"):
        opened(str(folder / name))
    (folder / "9.png").write_bytes(png())
    (folder / "8.png").write_bytes(b"")
    assert captions(opened(str(folder / name))) == [
        "caption 0", "(empty image file)", "(missing image file)"
    ]  # fmt: skip


def test_numbers_are_no_captions(opened: Open, folder: Path):
    pa.parquet.write_table(pa.table({"image": ["0.png"], "text": [7]}), folder / "a.parquet")
    with pytest.raises(UsageError, match=r"column 'text' holds int64; expected texts"):
        opened(str(folder / "a.parquet"))
