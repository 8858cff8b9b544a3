"""tools/repeat_tests.py on a few made-up tests."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import psutil
import pytest
import torch

import pytest_runs
import repeat_tests

if sys.platform != "linux":
    pytest.skip("cores are chosen on Linux only", allow_module_level=True)

#: Those that the options need; all that are installed take five times as long to import.
PLUGINS = {
    "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    "PYTEST_PLUGINS": "xdist.plugin,random_order.plugin,_hypothesis_pytestplugin",
}
ABOUT = {"machine": {"cpu": "x"}, "versions": {"torch": "2.8"}}
CONFTEST = """
import hypothesis
hypothesis.settings.register_profile("random", database=None)
def pytest_configure(config):
    config.addinivalue_line("markers", "concurrency: as the real ones")
"""
TESTS = """
import os, pytest
@pytest.mark.parametrize("number", range(30))
def test_passes(number): pass
@pytest.mark.skip
def test_is_skipped(): pass
@pytest.mark.concurrency
def test_fails_by_chance():
    assert os.getenv("CHANCE") != "1", "by chance"
"""


def test_runs_are_counted_and_recorded_and_a_failure_is_told_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("random_order")
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_made_up.py").write_text(TESTS)
    output = tmp_path / "results" / "runs.json"
    rest = [f"--output={output}", "--workers=0", "--", f"--rootdir={tmp_path}", str(tmp_path)]
    # At once: each time it imports torch.
    monkeypatch.setattr(pytest_runs.Place, "describe", lambda self: ABOUT)
    for name, value in {**PLUGINS, "CHANCE": "1"}.items():
        monkeypatch.setenv(name, value)
    assert repeat_tests.main(["--plain=1", *rest]) == 1
    assert "test_made_up::test_fails_by_chance" in capsys.readouterr().out
    monkeypatch.delenv("CHANCE")
    loads: list[str] = []
    monkeypatch.setattr(repeat_tests, "load", lambda: nullcontext(loads.append("begun")))
    assert repeat_tests.main(["--loaded=1", "--volatile=1", "--seed=5", *rest]) == 0
    assert loads == ["begun"]  # the loops themselves are tested below
    content = json.loads(output.read_text())
    assert content["command"].startswith("python tools/repeat_tests.py --plain=1 --output")
    assert {key: content[key] for key in ABOUT} == ABOUT
    keys = ("kind", "seed", "passed", "failed", "skipped", "exit_code")
    assert [tuple(record[key] for key in keys) for record in content["records"]] == [
        ("plain", None, 30, 1, 1, 1),
        ("loaded", 5, 31, 0, 1, 0),
        ("volatile", 6, 1, 0, 0, 0),
    ]
    plain, loaded, volatile = content["records"]
    (failure,) = plain["failures"]
    assert failure["test"].endswith("test_fails_by_chance")
    assert "AssertionError: by chance" in failure["message"]
    assert loaded["failures"] == volatile["failures"] == []
    assert all(record["seconds"] > 0 and record["cores"] for record in content["records"])
    assert "--random-order-seed=5 --hypothesis-profile=random" in loaded["command"]
    with pytest.raises(ValueError, match=r"expected records of the same versions, .*2\.9.*2\.8"):
        pytest_runs.append(output, ABOUT | {"versions": {"torch": "2.9"}}, {})


def test_what_hangs_is_ended(tmp_path: Path) -> None:
    (tmp_path / "test_slow.py").write_text("import time\ndef test(): time.sleep(600)\n")
    record = pytest_runs.run(pytest_runs.Place(), [f"--rootdir={tmp_path}", str(tmp_path)], 1)
    assert record["exit_code"] == "ended after 1 s"
    assert record["passed"] == 0
    assert not pytest_runs.green(record)


def test_the_interpreter_is_described() -> None:
    described = pytest_runs.Place().describe()
    assert described["machine"]["cores"] > 0
    assert described["versions"]["torch"] == torch.__version__.partition("+")[0]


def test_busy_loops_end_with_what_started_them() -> None:
    with pytest_runs.load() as loops:
        assert [loop.poll() for loop in loops] == [None] * len(os.sched_getaffinity(0))
    assert all(loop.poll() is not None for loop in loops)
    code = (
        "import os, pytest_runs as p; print(p.load().__enter__()[0].pid, flush=True); os._exit(0)"
    )
    tools = Path(pytest_runs.__file__).parent
    ended = subprocess.run([sys.executable, "-c", code], cwd=tools, stdout=subprocess.PIPE)
    while psutil.pid_exists(int(ended.stdout)):
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--plain=-1"], "expected no negative numbers"),
        (["--plain=1", "--cores", "99999"], r"--cores: expected some of \[.*\], got \[99999\]"),
    ],
)
def test_wrong_options_are_refused(
    tmp_path: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        repeat_tests.main([*words, f"--output={tmp_path / 'r.json'}"])
    assert re.search(message, capsys.readouterr().err)


def test_plain_runs_are_those_of_make_test() -> None:
    words = " ".join(pytest_runs.ARGUMENTS)
    recipe = f"PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest {words} $(PYTEST_ARGS)"
    assert f"OMP_NUM_THREADS=1 {recipe}" in (pytest_runs.ROOT / "Makefile").read_text()
