from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from machinery import group, inputs
from machinery.contenders import CLIP, Contender
from machinery.group import Group
from machinery.inputs import Case
from machinery.results import Result
from megabatch.benchmarking.measure import dense_clip_loss

CASE = Case("clip", "megabatch", "cpu", "float32", b=64, d=16, scale=14.3)


def results(made: Group, seconds: float = 60) -> dict[str, Result]:
    events = list(group.run(made, time.time() + seconds))
    return {case.contender: result for case, result in events if result is not None}


def together(*names: str, case: Case = CASE, once: bool = False) -> Group:
    cases = tuple(replace(case, contender=name) for name in names)
    return Group(cases, seconds=0.01, product_size=32, once=once)


def enter(monkeypatch: pytest.MonkeyPatch, name: str, loss: Callable[..., Tensor]) -> None:
    monkeypatch.setitem(CLIP.contenders, name, Contender(name, lambda: loss))


def test_one_that_fails_is_a_result_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def greedy(x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
        return torch.empty(1 << 60)

    def broken(x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
        raise TypeError("no kernel for this\nand more")

    enter(monkeypatch, "greedy", greedy)
    enter(monkeypatch, "broken", broken)
    enter(monkeypatch, "half", lambda x, y, scale: dense_clip_loss(x, y, scale) / 2)
    found = results(together("dense", "greedy", "broken", "half", "megabatch"))
    status = {name: result.status for name, result in found.items()}
    assert status.pop("greedy") == "out of memory"
    assert status.pop("broken") == "failed"
    assert found["broken"].note == "TypeError: no kernel for this"
    assert status == {"dense": "ok", "half": "wrong", "megabatch": "ok"}
    assert all(len(found[name].times_ms) >= 2 for name in status)
    # The products after one are those before the next.
    assert found["dense"].product_rates[1] == found["half"].product_rates[0]


@pytest.mark.parametrize("backward", [True, False])
def test_a_single_call_of_repeated_rows(backward: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (inputs, group):
        monkeypatch.setattr(module, "PERIOD", 16)
    group._exact.cache_clear()
    calls: list[int] = []

    def counted(x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
        calls.append(len(x))
        return dense_clip_loss(x, y, scale)

    enter(monkeypatch, "counted", counted)
    case = replace(CASE, backward=backward)
    found = results(together("counted", case=case, once=True))["counted"]
    group._exact.cache_clear()
    assert calls == [32, 64]  # two periods to compile, and the one that counts
    assert (found.status, len(found.times_ms), len(found.product_rates)) == ("ok", 1, 2)
    assert found.loss_error is not None
    assert found.loss_error < 1e-5
    assert (found.max_row_error is not None) == backward


def test_what_does_not_fit_into_the_time_is_skipped() -> None:
    assert results(together("dense"), seconds=0)["dense"].status == "skipped"
    long = replace(together("dense"), cost=100)
    assert results(long, seconds=60)["dense"] == Result("skipped", "no time left")
