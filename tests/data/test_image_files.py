from __future__ import annotations

from pathlib import Path

import pytest

from megabatch.data.image_files import ImageFiles
from megabatch.data.pairs import BadSample
from megabatch.errors import UsageError


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ImageFiles:
    """Beside tables/a.csv, with home as the working directory; 1 is in both, 2 and 3 in one."""
    for folder, names in (("tables", "12"), ("home", "13")):
        (tmp_path / folder).mkdir()
        for name in names:
            (tmp_path / folder / name).write_text(f"{folder} {name}")
    monkeypatch.chdir(tmp_path / "home")
    return ImageFiles.beside(tmp_path / "tables" / "a.csv")


def test_the_tables_folder_comes_before_the_working_directory(files: ImageFiles, tmp_path: Path):
    assert [files.read(name, "") for name in "123"] == [b"tables 1", b"tables 2", b"home 3"]
    assert files.read(str(tmp_path / "home" / "1"), "") == b"home 1"


def test_the_working_directory_of_the_beginning_counts(
    files: ImageFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    assert files.read("3", "") == b"home 3"


def test_bytes_and_structs_stand_for_themselves(files: ImageFiles):
    assert files.read(b"data", "") == b"data"
    assert files.read({"bytes": b"data", "path": "1"}, "") == b"data"
    assert files.read({"bytes": None, "path": "2"}, "") == b"tables 2"


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (None, "no image: a.csv:row 4"),
        ("", "no image: a.csv:row 4"),
        ({"bytes": None, "path": None}, "no image: a.csv:row 4"),
        (3, "no image: a.csv:row 4"),
        ("9", "missing image file: a.csv:row 4, tried {0}/tables/9 and {0}/home/9"),
        ("/elsewhere/9", "missing image file: a.csv:row 4, tried /elsewhere/9"),
        ("a\0b", "missing image file: a.csv:row 4, tried {0}/tables/a\0b and {0}/home/a\0b"),
        ("x" * 300, "unreadable image file: a.csv:row 4, tried {0}/tables/xxx"),
        ("..", "unreadable image file: a.csv:row 4, tried {0}/tables/.."),
        ("https://a.b/c.jpg", "missing image file: a.csv:row 4, a URL, and nothing is downloaded"),
        ("empty", "empty image file: a.csv:row 4"),
    ],
)
def test_what_cannot_be_read_names_the_row_and_what_was_tried(
    files: ImageFiles, tmp_path: Path, value: object, told: str
):
    (tmp_path / "tables" / "empty").write_bytes(b"")
    with pytest.raises(BadSample) as caught:
        files.read(value, "a.csv:row 4")
    assert str(caught.value).startswith(told.format(tmp_path))


def look(files: ImageFiles, names: list[object]) -> list[str]:
    return files.look(len(names), names.__getitem__, lambda i: f"row {i + 1}", "a.csv")


def test_some_missing_files_are_a_note(files: ImageFiles, tmp_path: Path):
    assert look(files, ["1", "2", "3", b"data", None, ""]) == []
    (note,) = look(files, ["1", "8", "3", "9"])
    assert note == (
        "a.csv: 2 of 4 image files that were checked are missing, the first is '8' (row 2), tried "
        f"{tmp_path}/tables/8 and {tmp_path}/home/8"
    )


def test_where_none_is_there_it_is_an_error(files: ImageFiles):
    with pytest.raises(
        UsageError, match=r"none .* the first of 2 missing ones is '8' \(row 1\), t"
    ):
        look(files, ["8", "9"])
    with pytest.raises(UsageError, match=r"first of 1,000 missing ones of 1,000 looked at is '8'"):
        look(files, ["8"] * 2000)
    with pytest.raises(UsageError, match=r"is 'http://a/b' \(row 1\), a URL, and nothing is down"):
        look(files, ["http://a/b"])
