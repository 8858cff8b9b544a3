from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import IO

import pytest

from machinery import supervise
from machinery.group import Group
from machinery.inputs import Case

CASE = Case("clip", "0", "cpu", "float32", b=64, d=16, scale=14.3)
GROUPS = [
    Group(tuple(replace(CASE, contender=str(i)) for i in range(2)), seconds=0.0),
    Group(tuple(replace(CASE, contender=str(i)) for i in range(2, 4)), seconds=0.0),
]

# Does the cases it is not told to leave out; the first word says what becomes of case 1.
WORKER = """
import json, sys, time
fate, skip = sys.argv[1], json.loads(sys.argv[2])
for i in range(4):
    if i in skip:
        continue
    print(json.dumps({"case": i}), flush=True)
    if i == 1 and fate == "dies":
        print("the reason", file=sys.stderr)
        sys.exit(3)
    if i == 1 and fate == "hangs":
        time.sleep(100)
    print(json.dumps({"case": i, "result": {"status": "ok"}}), flush=True)
"""


class Starter:
    def __init__(self, *words: str) -> None:
        self.words, self.skipped = words, []  # type: ignore[var-annotated]

    def __call__(self, skip: Collection[int], messages: IO[bytes]) -> subprocess.Popen[bytes]:
        self.skipped.append(sorted(skip))
        words = [sys.executable, *self.words, json.dumps(sorted(skip))]
        return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=messages)


def statuses(start: Starter, log: Path, seconds: float = 30, patience: float = 20) -> list[str]:
    found = supervise.supervise(GROUPS, start, log, time.time() + seconds, patience)
    return [f"{case.contender} {result.status} {result.note}".strip() for case, result in found]


@pytest.mark.parametrize(
    ("fate", "of_1", "skipped"),
    [
        ("lives", "ok", [[]]),
        ("dies", "failed the reason", [[], [0, 1]]),
        ("hangs", "failed no sign of life for 2 s", [[], [0, 1]]),
    ],
)
def test_after_a_crash_or_a_hang_another_worker_goes_on(
    fate: str, of_1: str, skipped: list[list[int]], tmp_path: Path
) -> None:
    start = Starter("-c", WORKER, fate)
    found = statuses(start, tmp_path / "log", patience=2 if fate == "hangs" else 20)
    assert found == ["0 ok", f"1 {of_1}", "2 ok", "3 ok"]
    assert start.skipped == skipped


def test_at_the_deadline_what_is_left_is_skipped(tmp_path: Path) -> None:
    begun = time.time()
    found = statuses(Starter("-c", WORKER, "hangs"), tmp_path / "log", seconds=2)
    assert time.time() - begun < 10
    assert found == ["0 ok", *(f"{i} skipped no time left" for i in (1, 2, 3))]


def test_a_worker_that_cannot_begin_is_an_error(tmp_path: Path) -> None:
    start = Starter("-c", "raise SystemExit('no such GPU')")
    with pytest.raises(RuntimeError, match="exit code 1: no such GPU"):
        statuses(start, tmp_path / "log")
