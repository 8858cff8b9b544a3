from __future__ import annotations

import pytest

from megabatch.benchmarking import launch, loss
from megabatch.benchmarking.contenders import CLIP
from megabatch.benchmarking.inputs import Case
from megabatch.benchmarking.measure import Effort, Result

EFFORT = Effort(seconds=0.0, repetitions=1, product_size=8, check_batch_size=8, max_memory=None)


def plan(rounds: int = 2, batch_sizes: tuple[int, ...] = (100, 200)) -> loss.Plan:
    return loss.Plan(
        loss=CLIP,
        contenders=CLIP.choose(("dense", "megabatch"), "cpu"),
        batch_sizes=batch_sizes,
        width=10,
        dtype="float32",
        device="cpu",
        scale=14.3,
        rounds=rounds,
        effort=EFFORT,
    )


def test_contenders_take_turns_and_sizes_follow_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    order: list[tuple[int, str]] = []

    def start(case: Case, effort: Effort) -> Result:
        assert effort is EFFORT
        order.append((case.b, case.contender))
        return Result("ok", "", (float(len(order)),), (1e9, 3e9), 10 * len(order), 0.1, 0.1, 0.1)

    told: list[str] = []
    monkeypatch.setattr(launch, "run", start)
    first, second = loss.run(plan(), told.append)
    assert order[:4] == [(100, n) for n in ("dense", "megabatch") * 2]
    assert order[4:] == [(200, n) for n in ("dense", "megabatch") * 2]
    assert told[0] == "dense, b = 100, round 1 of 2"
    assert [(r.contender, r.b, r.ms) for r in first] == [("dense", 100, 2), ("megabatch", 100, 3)]
    assert first[0].extra_bytes == 30
    assert second[1].times_ms == (6.0, 8.0)


def test_out_of_memory_is_not_tried_again_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    order: list[str] = []

    def start(case: Case, effort: Effort) -> Result:
        order.append(case.contender)
        if case.contender == "dense":
            return Result("out of memory", "tried to allocate 9 bytes")
        return Result("ok", "", (1.0,), (1e9, 1e9), 10, 0.1, 0.1, 0.1)

    monkeypatch.setattr(launch, "run", start)
    ((dense, mine),) = loss.run(plan(batch_sizes=(100,)), lambda _: None)
    assert order == ["dense", "megabatch", "megabatch"]
    assert (dense.status, dense.note, dense.ms) == (
        "out of memory",
        "tried to allocate 9 bytes",
        None,
    )
    assert mine.status == "ok"
