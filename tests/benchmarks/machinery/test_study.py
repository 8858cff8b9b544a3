from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from machinery import study, study_data
from machinery.study import (
    TUNING_SEED,
    InGroups,
    Run,
    Series,
    batches,
    chance,
    distinct,
    in_parts,
    pending,
    train_and_evaluate,
)
from machinery.study_data import Pairs, load
from megabatch.config.objective import create_objective
from megabatch.training import TrainConfig
from tests.benchmarks.study_files import write_wordnet


@pytest.mark.parametrize("loss", ["clip", "siglip", "dcl"])
def test_pairs_of_two_groups_never_meet(loss: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x, y = F.normalize(torch.randn(2, 12, 5, dtype=torch.float64, generator=generator), dim=-1)
    scale, bias = (torch.tensor(v, dtype=torch.float64) for v in (8.0, -3.0))
    inputs = [tensor.requires_grad_() for tensor in (x, y, scale, bias)]
    objective = create_objective(TrainConfig(loss=loss))
    groups = [slice(0, 4), slice(4, 8), slice(8, 12)]
    expected = sum(objective(x[g], y[g], scale, logit_bias=bias) for g in groups) / 3
    value = InGroups(objective, 4)(
        image_features=x, text_features=y, logit_scale=scale, logit_bias=bias
    )
    assert value.item() == pytest.approx(expected.item(), rel=1e-12)
    used = inputs if loss == "siglip" else inputs[:3]
    for mine, right in zip(
        torch.autograd.grad(value, used), torch.autograd.grad(expected, used), strict=True
    ):
        torch.testing.assert_close(mine, right, rtol=1e-10, atol=1e-12)
    whole = InGroups(objective, 12)(x, y, scale, bias)
    torch.testing.assert_close(whole, objective(x, y, scale, bias))


def test_a_seed_gives_one_sequence_of_samples_whatever_the_batch() -> None:
    n = 30
    train = Pairs(torch.arange(n)[:, None], torch.arange(n)[:, None], torch.arange(n))

    def sequence(batch: int, steps: int, seed: int = 0) -> list[int]:
        run = Run("wordnet", "clip", batch, batch, steps, 1e-3, seed)
        made = [*batches(train, run)]
        assert [len(one) for one in made] == [batch] * steps
        assert all(torch.equal(one.images, one.texts) for one in made)
        return [*itertools.chain.from_iterable(one.images.flatten().tolist() for one in made)]

    small, large = sequence(4, 18), sequence(24, 3)
    assert small == large
    assert sorted(small[:n]) == sorted(small[n : 2 * n]) == [*range(n)]  # each once a pass
    assert small[:n] != small[n : 2 * n]
    assert sequence(24, 3, seed=1) != small


def test_the_distinct_texts_and_chance() -> None:
    texts, ids = torch.tensor([[7], [5], [7], [6]]), torch.tensor([70, 50, 70, 60])
    test = Pairs(torch.arange(4)[:, None], texts, ids)
    found, their_ids = distinct(test)
    assert their_ids.tolist() == [50, 60, 70]
    assert found.flatten().tolist() == [5, 6, 7]
    # One of three texts is right for each first element; of four, one, one and two are.
    assert chance(test) == {"recall@1": pytest.approx((1 / 3 + 1 / 3) / 2), "recall@10": 1.0}


def test_a_curve_has_the_means_of_equal_parts() -> None:
    assert in_parts([1.0, 3.0, 5.0, 7.0, 9.0], 2) == [2.0, 7.0]
    assert in_parts([1.0, 2.0], 32) == [1.0, 2.0]
    assert in_parts([], 32) == []


def test_a_run_learns_and_one_that_diverges_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(study_data, "_BUCKETS", 512)  # AdamW's step over 16,384 takes longest
    data = load("wordnet", write_wordnet(tmp_path / "wordnet", 60), torch.device("cpu"))
    run = Run("wordnet", "clip", 32, 16, 40, 3e-3, 0)
    record = train_and_evaluate(run, data, "fp32")
    assert record["status"] == "ok"
    assert (record["batch"], record["group"], record["lr"]) == (32, 16, 3e-3)
    assert len(record["losses"]) == 32
    assert record["losses"][-1] < record["losses"][0] - 0.5
    assert record["tests"].keys() == data.tests.keys()
    assert all(0 <= test["recall@1"] <= test["recall@10"] <= 1 for test in record["tests"].values())
    assert train_and_evaluate(run, data, "fp32")["losses"] == record["losses"]
    # Weights overflow within a few steps.
    diverged = train_and_evaluate(Run("wordnet", "clip", 32, 32, 40, 1e15, 0), data, "fp32")
    assert "tests" not in diverged
    assert "not taken" in diverged["status"]


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
    while todo := [run for run in pending([series], 0, found)]:
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
    assert rate == study.LOWEST_RATE  # equal scores: the lowest
    rising = tuned(SERIES, lambda run: run.lr)
    assert SERIES.rate(16, 4, rising)[0] == study.HIGHEST_RATE


def test_runs_that_tune_come_first_then_seed_after_seed() -> None:
    first = pending([SERIES], 2, {})
    assert len(first) == 3 * 5
    assert all(run.seed == TUNING_SEED for run in first)
    found = tuned(SERIES, best_at(2e-3))
    todo = pending([SERIES], 2, found)
    assert [(run.batch, run.group, run.steps) for run in todo] == SERIES.shapes() * 2
    assert [run.seed for run in todo] == [0] * 8 + [1] * 8
    found |= {run: record(run, 0.1) for run in todo[:9]}
    assert pending([SERIES], 2, found) == todo[9:]


def test_a_size_can_begin_when_its_rate_is_known() -> None:
    found = tuned(SERIES, best_at(2e-3))
    del found[next(run for run in found if run.batch == 8)]
    ready = pending([SERIES], 1, found)
    assert [run.seed for run in ready].count(TUNING_SEED) == 1
    assert all(run.batch != 8 or run.steps == 4 for run in ready[1:])
