"""Files that are whole or absent."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from megabatch.files import folder_problem, replacing, write_text


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o077])
def test_a_file_has_the_mode_that_the_umask_leaves(umask: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        with replacing(tmp_path / "file") as partial:
            partial.write_text("new")
            partial.chmod(0o600)  # as safetensors does
    finally:
        os.umask(before)
    assert mode(tmp_path / "file") == 0o666 & ~umask


def test_names_that_no_folder_can_have(tmp_path: Path) -> None:
    assert "File name too long" in folder_problem(tmp_path / ("a" * 300))
    assert folder_problem(tmp_path / "a" / "b") == ""


def test_an_error_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    write_text(tmp_path / "file", "old")

    def write() -> None:
        with replacing(tmp_path / "file") as partial:
            partial.write_text("ne")
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write()
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text() == "old"


def test_what_a_killed_process_left_is_no_hindrance(tmp_path: Path) -> None:
    (tmp_path / "file.partial").write_text("half")
    (tmp_path / "file.partial").chmod(0o600)
    write_text(tmp_path / "file", "new")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert mode(tmp_path / "file") != 0o600
