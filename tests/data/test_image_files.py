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


def test_where_no_file_is_there_it_is_an_error(files: ImageFiles):
    for names in (["8", "3"], [b"data", None, ""]):
        files.check(names, "a.csv")
    with pytest.raises(UsageError, match=r"a\.csv: none of its image files exists: '8', tried /"):
        files.check(["8", None, "9"], "a.csv")
    with pytest.raises(UsageError, match="exists: 'http://a/b', a URL, and nothing is downloaded"):
        files.check(["http://a/b"], "a.csv")
