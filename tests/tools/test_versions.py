"""tools/versions.py without installing anything."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

import versions


def test_the_oldest_of_each() -> None:
    required = [
        *("torch>=2.9", "timm>=1.0.17", "numpy>=1.26,<3", "anything"),
        "tomli>=2.0; python_version < '3.0'",
    ]
    assert versions.oldest(required) == ["torch==2.9.*", "timm==1.0.17", "numpy==1.26.*"]
    required = versions.requirements()
    assert "torch==2.9.*" in versions.oldest(required)
    assert all(">=" in requirement for requirement in required)


def test_each_environment_is_installed_tested_and_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    installed: list[tuple[str, int, str]] = []

    def install(folder: Path, constraints: Sequence[str], extras: Sequence[str]) -> Path:
        assert ("fp8" in extras) == (folder.name != "oldest")
        installed.append((folder.name, len(constraints) > 1, constraints[0]))
        return Path(sys.executable)

    about = {"machine": {"cpu": "x"}, "versions": {"torch": "2.8"}}
    monkeypatch.setattr(versions, "install", install)
    monkeypatch.setattr(versions, "_pip", said_by_pip)
    monkeypatch.setattr(versions.Place, "describe", lambda self: about)
    monkeypatch.setattr(versions, "ARGUMENTS", ("-q",))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # it starts five times as fast
    (tmp_path / "test_made_up.py").write_text("def test_of_one(): assert 1 == 2\ndef test_two(): 1")
    (tmp_path / "versions.json").write_text("an earlier record")
    words = [f"--output={tmp_path / 'versions.json'}", "--", f"--rootdir={tmp_path}", str(tmp_path)]
    assert versions.main(words) == 1
    assert installed == [("oldest", True, "torch==2.9.*"), ("2.10", False, "torch==2.10.*")]
    content = json.loads((tmp_path / "versions.json").read_text())
    assert content["command"].startswith("python tools/versions.py --output=")
    assert content["machine"] == about["machine"]
    for record, name in zip(content["records"], ("oldest", "2.10"), strict=True):
        assert record["environment"] == name
        assert record["versions"] == about["versions"]
        assert (record["passed"], record["failed"], record["exit_code"]) == (1, 1, 1)
        assert record["failures"][0]["test"].endswith("test_of_one")
    out = capsys.readouterr().out
    assert "1 passed, 1 failed" in out
    assert "pip's settings have global.constraint='caps.txt'; they do not apply" in out


def test_an_environment_has_its_constraints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []
    monkeypatch.setattr(versions.venv, "create", lambda folder, **_: folder.mkdir(parents=True))
    monkeypatch.setattr(versions.subprocess, "run", lambda words, check: commands.append(words))
    python = versions.install(tmp_path / "oldest", ["torch==2.9.*"], ["train", "dev"])
    assert python == tmp_path / "oldest" / "bin" / "python"
    (command,) = commands
    assert command[1:5] == ["-m", "uv", "pip", "install"]
    assert command[command.index("--python") + 1] == str(python)
    file = tmp_path / "oldest" / "constraints.txt"
    assert command[-4:-2] == ["--constraint", str(file)]
    assert command[-1] == f"{versions.ROOT}[train,dev]"
    assert file.read_text() == "torch==2.9.*\n"


def test_minor_releases_are_those_that_the_index_has_and_pyproject_allows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(versions, "_pip", said_by_pip)
    assert versions.minor_releases() == ["2.9", "2.10"]
    monkeypatch.setattr(versions, "requirements", lambda: ["numpy>=1", "torch>=2.8,!=2.9.*"])
    assert versions.minor_releases() == ["2.8", "2.10"]


def said_by_pip(*words: str) -> str:
    if words[0] == "index":
        return "torch (2.10.1)\nAvailable versions: 2.10.1, 2.10.0, 2.9.1, 2.9.0, 2.8.0, 1.13.1\n"
    return "global.constraint='caps.txt'\nglobal.timeout='60'\n"
