from __future__ import annotations

import math
from typing import Any

import pytest

from machinery import study_plan
from machinery.study_plan import TUNING_SEED, Series, estimate, pending, run_of, waiting
from machinery.study_runs import Run

SERIES = Series("icons", "clip", (4, 8, 16), samples=64)


def record(run: Run, recall: float | None) -> dict[str, Any]:
    made = {**vars(run), "seconds": 2.0}
    return made if recall is None else {**made, "tests": {"validation": {"recall@10": recall}}}


def best_at(lr: float) -> Any:
    """A score that falls with the distance from a learning rate."""
    return lambda run: 1 / (1 + abs(math.log2(run.lr / lr)))


def tuned(series: Series, recall: Any) -> dict[Run, dict[str, Any]]:
    """The records of all runs that tune."""
    found: dict[Run, dict[str, Any]] = {}
    while todo := [*series.tuning(found)]:
        found |= {run: record(run, recall(run)) for run in todo}
    return found


def test_arms_meet_in_the_largest_batch() -> None:
    assert SERIES.points("negatives") == [(4, 16, 4, 4), (8, 16, 8, 4), (16, 16, 16, 4)]
    assert SERIES.points("long") == [(4, 8, 4, 8), (8, 8, 8, 8)]  # groups of one have no negatives
    assert SERIES.points("samples") == [(4, 4, 4, 16), (8, 8, 8, 8), (16, 16, 16, 4)]
    assert SERIES.points("steps") == [(4, 4, 4, 4), (8, 8, 8, 4), (16, 16, 16, 4)]
    shapes = SERIES.shapes()
    assert shapes[0] == (16, 16, 4)
    assert len(shapes) == len(set(shapes)) == 8


@pytest.mark.parametrize(
    ("best", "tried"),
    [(2e-3, 3), (1e-3, 4), (4e-3, 4), (1.6e-2, 6), (2.5e-4, 6)],
)
def test_rates_are_tried_until_the_best_is_between_others(best: float, tried: int) -> None:
    found = tuned(SERIES, best_at(best))
    for batch, group, steps in SERIES.shapes():
        if batch == group:
            rate, todo = SERIES.rate(batch, steps, found)
            assert (rate, todo) == (pytest.approx(best), [])
    assert len(found) == 5 * tried  # three sizes at equal samples, two further ones at equal steps
    assert {run.seed for run in found} == {TUNING_SEED}


def test_a_run_that_diverged_is_the_worst_and_rates_have_bounds() -> None:
    found = tuned(SERIES, lambda run: None if run.lr > 1e-3 else 0.5)
    rate, _ = SERIES.rate(16, 4, found)
    assert rate == study_plan.LOWEST_RATE  # equal scores: the lowest
    rising = tuned(SERIES, lambda run: run.lr)
    assert SERIES.rate(16, 4, rising)[0] == study_plan.HIGHEST_RATE


def test_runs_that_tune_come_first_then_seed_after_seed() -> None:
    plan, found = [SERIES], {}
    first = [*pending(plan, 2, found)]
    assert len(first) == 3 * 5
    assert all(run.seed == TUNING_SEED for run in first)
    assert len(waiting(plan, 2, found)) == 2 * 8
    found = tuned(SERIES, best_at(2e-3))
    todo = [*pending(plan, 2, found)]
    assert waiting(plan, 2, found) == []
    assert [(run.batch, run.group, run.steps) for run in todo] == SERIES.shapes() * 2
    assert [run.seed for run in todo] == [0] * 8 + [1] * 8
    found |= {run: record(run, 0.1) for run in todo[:9]}
    assert [*pending(plan, 2, found)] == todo[9:]


def test_a_size_can_begin_when_its_rate_is_known() -> None:
    found = tuned(SERIES, best_at(2e-3))
    del found[next(run for run in found if run.batch == 8)]
    ready = [*pending([SERIES], 1, found)]
    assert [run.seed for run in ready].count(TUNING_SEED) == 1
    assert all(run.batch != 8 or run.steps == 4 for run in ready[1:])
    assert [run.batch for run in waiting([SERIES], 1, found)] == [8, 8]  # whole, and in groups


def test_records_know_their_run_and_its_time() -> None:
    run = Run("icons", "clip", 8, 4, 10, 1e-3, 0)
    assert run_of(record(run, 0.1)) == run
    other = Run("icons", "clip", 8, 4, 10, 2e-3, 3)
    assert estimate(other, {run: record(run, 0.1)}) == 2.0
    assert estimate(other, {}) == study_plan.OVERHEAD_SECONDS + 10 * (0.007 + 0.001)


@pytest.mark.parametrize(
    ("sizes", "samples"), [((4, 6, 16), 64), ((8, 4, 16), 64), ((4, 16), 40), ((4, 16), 0)]
)
def test_series_that_do_not_divide_are_refused(sizes: tuple[int, ...], samples: int) -> None:
    with pytest.raises(ValueError, match="expected"):
        Series("icons", "clip", sizes, samples)
