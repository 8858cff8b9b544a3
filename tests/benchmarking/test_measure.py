from __future__ import annotations

import dataclasses

import pytest
import torch

from megabatch.benchmarking.contenders import CLIP, Contender, two_products
from megabatch.benchmarking.inputs import Case
from megabatch.benchmarking.measure import Effort, measure
from megabatch.benchmarking.step import SANE

EFFORT = Effort(seconds=0.0, repetitions=2, product_size=64, check_batch_size=48, max_memory=None)


def case(contender: str = "megabatch", **changes: object) -> Case:
    made = Case("clip", contender, "cpu", "float32", b=96, d=16, scale=14.3)
    return dataclasses.replace(made, **changes)  # type: ignore[arg-type]


def enter(monkeypatch: pytest.MonkeyPatch, name: str, loss) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setitem(CLIP.contenders, name, Contender(name, "", lambda: loss))


@pytest.mark.parametrize("dtype", SANE)
@pytest.mark.parametrize("contender", ["megabatch", "dense"])
def test_a_right_loss_is_ok(contender: str, dtype: str) -> None:
    result = measure(case(contender, dtype=dtype), EFFORT)
    assert (result.status, result.note) == ("ok", "")
    assert len(result.times_ms) == 2
    assert len(result.product_rates) == 2
    assert result.extra_bytes is not None
    errors = (result.max_row_error, result.loss_error, result.scale_gradient_error)
    assert all(e is not None and 0 <= e <= SANE[dtype] for e in errors)


def test_another_loss_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def one_direction(x: torch.Tensor, y: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(scale * x @ y.T, torch.arange(len(x)))

    enter(monkeypatch, "half", one_direction)
    result = measure(case("half"), EFFORT)
    assert result.status == "wrong"
    assert "gradient is off by" in result.note
    assert result.times_ms


def test_nan_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    enter(monkeypatch, "nan", lambda x, y, s: two_products(x, y, s) * torch.nan)
    result = measure(case("nan"), EFFORT)
    assert (result.status, result.max_row_error) == ("wrong", None)
    assert "not finite" in result.note


def test_a_failed_allocation_is_out_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def greedy(x: torch.Tensor, y: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        if len(x) > 64:
            torch.empty(1 << 60)
        return two_products(x, y, scale)

    enter(monkeypatch, "greedy", greedy)
    result = measure(case("greedy"), EFFORT)
    assert result.status == "out of memory"
    assert result.note.startswith("tried to allocate")


def test_any_other_error_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(x: torch.Tensor, y: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no kernel for this")

    enter(monkeypatch, "broken", broken)
    with pytest.raises(RuntimeError, match="no kernel"):
        measure(case("broken"), EFFORT)


def test_half_precision_runs_under_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []

    def spy(x: torch.Tensor, y: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        seen.append(torch.is_autocast_enabled("cpu"))
        return two_products(x, y, scale)

    enter(monkeypatch, "spy", spy)
    measure(case("spy", dtype="bfloat16"), EFFORT)
    assert all(seen)
    seen.clear()
    measure(case("spy"), EFFORT)
    assert not any(seen)


@pytest.mark.gpu
@pytest.mark.parametrize("contender", [c.name for c in CLIP.choose((), "cuda")])
def test_on_cuda(contender: str) -> None:
    result = measure(case(contender, device="cuda", dtype="bfloat16", b=1024), EFFORT)
    assert result.status == "ok"
    assert result.extra_bytes is not None
    assert result.extra_bytes > 0
