from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from megabatch.benchmarking import records


def test_a_record_names_the_commit_of_the_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "src/megabatch"
    package.mkdir(parents=True)
    source = package / "__init__.py"
    source.write_text("one = 1\n")
    monkeypatch.setattr(records.megabatch, "__file__", str(source))
    assert records.commit() is None
    git = ["git", "-C", str(tmp_path), "-c", "user.name=A", "-c", "user.email=a@b.c"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run([*git, *words], check=True)
    name = records.commit()
    assert name is not None
    assert re.fullmatch("[0-9a-f]{7,}", name)
    (tmp_path / "record.json").touch()
    assert records.commit() == name
    source.write_text("one = 2\n")
    assert records.commit() == f"{name}-dirty"
