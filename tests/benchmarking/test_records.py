from __future__ import annotations

from pathlib import Path

import pytest

from megabatch.benchmarking import records


def test_a_record_has_a_hash_of_each_package_that_it_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("losses", "similarity/triton"):
        (tmp_path / name).mkdir(parents=True)
    source = tmp_path / "similarity/triton/kernel.py"
    source.write_text("one = 1\n")
    monkeypatch.setattr(records.megabatch, "__file__", str(tmp_path / "__init__.py"))
    before = records.sources()
    assert [*before] == ["losses", "similarity"]
    (tmp_path / "similarity/notes.txt").touch()
    assert records.sources() == before
    source.write_text("one = 2\n")
    after = records.sources()
    assert [after[name] == before[name] for name in before] == [True, False]
    assert records.environment()["sources"] == after
