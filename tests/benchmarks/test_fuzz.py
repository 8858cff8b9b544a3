"""benchmarks/fuzz.py: a short run of it, and that it sees what is wrong."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fuzz
from fuzzing import check, groups
from fuzzing.calls import CALLS
from fuzzing.cases import draw
from tests.process_state import changed
from tests.server import start_server

DTYPES = ("float64",)


def outcomes(cases: list[Any]) -> list[str]:
    return [outcome for _, outcome in groups.run(cases, "cpu")]


def some(number: int, wanted: Callable[[Any], bool]) -> list[Any]:
    found = (draw(1, index, DTYPES, 3) for index in range(5000))
    return [case for case in found if wanted(case)][:number]


def test_a_short_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """tests/losses/test_random_calls.py has more, and tests/similarity/distributed/test_fuzz.py."""
    output = tmp_path / "fuzz.json"
    words = ["fuzz.py", "--cases=30", "--ranks=1", f"--output={output}"]
    monkeypatch.setattr(sys, "argv", words)
    with changed("threads", torch.get_num_threads()):
        assert fuzz.main() == 0
    content = json.loads(output.read_text())
    assert content["command"] == "python fuzz.py --cases=30 --ranks=1 --output=fuzz.json"
    assert {"date", "machine", "versions", "sources"} <= set(content)
    assert content["cases"] == 30
    assert content["failed"] == 0
    assert content["failures"] == []
    assert {record["call"] for record in content["records"]} <= set(CALLS)
    assert sum(r["cases"] for r in content["records"] if r["status"] == "ok") > 25


def test_a_failure_is_recorded_with_its_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (case,) = some(1, lambda case: case["call"] == "siglip" and case["ranks"] == 1)
    monkeypatch.setitem(check.TRUTHS, "siglip", lambda case, given, product: [torch.ones(())])
    output = tmp_path / "fuzz.json"
    words = ["--seed=1", f"--only={case['index']}", f"--output={output}"]
    monkeypatch.setattr(sys, "argv", ["fuzz.py", *words])
    assert fuzz.main() == 1
    (failure,) = json.loads(output.read_text())["failures"]
    assert failure["case"] == draw(1, case["index"], DTYPES, 3)
    assert "result 0" in failure["failure"]
    assert json.dumps([case], indent=1) in capsys.readouterr().out


def attempt_but_4(case: Any, rank: int, device: str) -> tuple[str, bool]:
    if case["index"] == 4:
        os._exit(3)
    return "", True


def test_processes_share_the_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    start_server()
    cases = [draw(1, index, DTYPES, 1) for index in range(20)]
    found = [*groups.run_in_processes(cases, "cpu", 2)]
    assert sorted(case["index"] for case, _ in found) == [*range(20)]
    assert {outcome for _, outcome in found} <= {"", "undecided"}
    monkeypatch.setattr(groups, "attempt", attempt_but_4)
    alone = groups.run_in_processes(cases, "cpu", 1)
    told = {case["index"]: outcome for case, outcome in alone}
    assert [told[index] for index in range(4)] == [""] * 4
    assert all("terminated abruptly" in told[index] for index in range(4, 20))


def test_low_precisions_on_the_cpu() -> None:
    dtypes = ("bfloat16", "float16", "float32")
    assert set(outcomes([draw(2, index, dtypes, 1) for index in range(60)])) <= {"", "undecided"}


def test_a_case_is_the_same_again_and_covers_all_options() -> None:
    assert draw(3, 17, DTYPES, 3) == draw(3, 17, DTYPES, 3) != draw(4, 17, DTYPES, 3)
    drawn = [draw(3, index, DTYPES, 3) for index in range(3000)]
    assert json.loads(json.dumps(drawn)) == drawn
    seen: dict[str, Counter[str]] = defaultdict(Counter)
    for case in drawn:
        seen["ranks"][case["ranks"]] += 1
        for size in case["rows"]:
            seen["rows"][f"{min(size, 2)} of {case['ranks']}"] += 1
        for made in case["features"].values():
            seen["features"][f"{made['layout']}, {made['frozen']}, {made['is'] is None}"] += 1
        for name, value in case["options"].items():
            seen[f"{case['call']}: {name}"][str(value)] += 1
    assert len(seen) > 30
    for name, values in seen.items():
        assert len(values) > 1, name
        assert len(values) > 20 or min(values.values()) >= 3, (name, values)


@pytest.mark.parametrize("name", ["clip", "supcon", "logsumexp", "softplus_sum", "ranks"])
def test_a_wrong_value_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = some(4, lambda case: case["call"] == name and case["ranks"] == 1)
    cases = [case for case in cases if min(case["rows"] + case["columns"]) > 3]
    assert set(outcomes(cases)) == {""}
    truth = check.TRUTHS[name]
    wrong = (lambda t: t + 1) if name == "ranks" else lambda t: t + 3e-9 * (1 + t.abs())
    monkeypatch.setitem(
        check.TRUTHS, name, lambda *args: [wrong(output) for output in truth(*args)]
    )
    for outcome in outcomes(cases):
        assert "result 0" in outcome


@pytest.mark.parametrize("leaf", ["x", "y", "scale"])
def test_a_wrong_gradient_is_seen(leaf: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (case,) = some(
        1,
        lambda case: (
            case["call"] == "clip"
            and case["ranks"] == 1
            and case["scale_learnt"]
            and case["weights"] == case["ids"] is None
            and case["rows"][0] > 3
            and case["scale"] > 1
            and not any(made["frozen"] or made["is"] for made in case["features"].values())
        ),
    )
    assert outcomes([case]) == [""]
    gradients = check.Side.gradients

    def wrong(side: Any, outputs: list[torch.Tensor]) -> Any:
        found = gradients(side, outputs)
        key = leaf, -1 if leaf == "scale" else 0
        return {**found, key: found[key] * (1 + 1e-7 * (side.dtype == torch.float64))}

    calls_of: list[Any] = []
    monkeypatch.setattr(
        check.Side,
        "gradients",
        lambda side, outputs: (
            calls_of.append(side) or (gradients if len(calls_of) > 1 else wrong)(side, outputs)
        ),
    )
    (outcome,) = outcomes([case])
    assert f"gradient of {leaf}" in outcome


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ([("undecided", True), ("", True)], ("undecided", True)),
        ([("", True), ("off", True)], ("rank 1: off", True)),
        ([("raised", False), ("", True)], ("rank 0: raised", False)),
        ([None, ("", True)], ("rank 0: it died", False)),
    ],
)
def test_what_ranks_tell(answers: list[Any], expected: tuple[str, bool]) -> None:
    pipes = [multiprocessing.Pipe() for _ in answers]
    for answer, (_, theirs) in zip(answers, pipes, strict=True):
        theirs.send(answer) if answer else theirs.close()
    assert groups.ask([ours for ours, _ in pipes], {"index": 0}) == expected


@pytest.mark.concurrency
def test_groups_of_ranks() -> None:
    start_server()
    cases = some(3, lambda case: case["ranks"] == 2)
    assert set(outcomes(cases)) <= {"", "undecided"}
