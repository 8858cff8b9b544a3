from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from megabatch.errors import UsageError
from megabatch.evaluation.report.content import Content, Picture, load, relative, save


def test_an_evaluation_s_content_is_read_back_as_it_was(evaluated: Path) -> None:
    content = load(evaluated)
    assert content is not None
    assert len(content.tasks) == 2
    assert content.run == "."
    save(evaluated, content)
    assert load(evaluated) == content


def test_a_folder_without_the_file_has_no_content(tmp_path: Path) -> None:
    assert load(tmp_path) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tasks": None}, "expected list"),
        ({"tasks": [{"title": 3}]}, "expected str, got '3'"),
        ({"tasks": ["text"]}, "expected dict"),
        ({"run": True}, "expected str, got 'True'"),
    ],
)
def test_other_values_are_refused(tmp_path: Path, change: dict, message: str) -> None:
    save(tmp_path, Content(None, []))
    path = tmp_path / "report.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(UsageError, match=rf"report\.json is not .*{message}.*: evaluate again"):
        load(tmp_path)
    path.write_text('{"run": null')
    with pytest.raises(UsageError, match="evaluate again"):
        load(tmp_path)
    path.write_text("{}")
    with pytest.raises(UsageError, match="'run'"):
        load(tmp_path)


def test_a_picture_loads_nothing_from_elsewhere() -> None:
    picture = Picture("png", "AAAA", small=True)
    assert picture.uri == "data:image/png;base64,AAAA"
    hostile = replace(picture, kind="html,<script>", data="https://example.com/")
    assert hostile.uri.startswith("data:image/jpeg;base64,")


def test_the_run_is_found_after_both_folders_moved(tmp_path: Path) -> None:
    run, folder = tmp_path / "runs" / "a", tmp_path / "evaluations" / "a"
    assert relative(run, folder) == "../../runs/a"
    assert relative(None, folder) is None
