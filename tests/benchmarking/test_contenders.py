from __future__ import annotations

import dataclasses

import pytest
import torch

from megabatch.benchmarking import contenders, step
from megabatch.benchmarking.contenders import CLIP, Contender
from megabatch.benchmarking.inputs import Case
from megabatch.errors import UsageError


@pytest.mark.parametrize("name", [c.name for c in CLIP.contenders.values() if c.runs_on("cpu")])
def test_every_contender_is_the_loss(name: str) -> None:
    made = Case("clip", name, "cpu", "float64", b=20, d=8, scale=30.0)
    inputs = step.make_inputs(made)
    call = step.forward_backward(CLIP.contenders[name].load(), made, inputs)
    value, exact = call(), step.exact_result(made, inputs)
    found = [value, inputs.x.grad, inputs.y.grad, *(scalar.grad for scalar in inputs.scalars)]
    for mine, theirs in zip(found, [t for t in exact if t is not None], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-11)


def test_none_named_means_all_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = Contender("gone", "", lambda: contenders.two_products, ("no_such_module", "gone"))
    monkeypatch.setitem(CLIP.contenders, "gone", missing)
    here = ["megabatch", "megabatch-keeping", "dense", "openclip"]
    assert [c.name for c in CLIP.choose((), "cpu")] == here
    with pytest.raises(UsageError, match="pip install gone"):
        CLIP.choose(("gone",), "cpu")


def test_two_products_are_measured_if_openclip_is_not_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert [c.name for c in CLIP.duplicates("cpu")] == ["two-products"]
    gone = dataclasses.replace(CLIP.contenders["openclip"], needs=("no_such_module", "gone"))
    monkeypatch.setitem(CLIP.contenders, "openclip", gone)
    assert CLIP.duplicates("cpu") == []
    assert "two-products" in [c.name for c in CLIP.choose((), "cpu")]


def test_what_needs_cuda_is_not_measured_on_the_cpu() -> None:
    assert "dense-compiled" in [c.name for c in CLIP.choose((), "cuda")]
    assert "dense-compiled" not in [c.name for c in CLIP.choose((), "cpu")]
    with pytest.raises(UsageError, match="needs --device cuda"):
        CLIP.choose(("dense-compiled",), "cpu")


def test_order_of_the_names_is_kept() -> None:
    assert [c.name for c in CLIP.choose(("dense", "megabatch"), "cpu")] == ["dense", "megabatch"]


@pytest.mark.parametrize(
    ("names", "words"), [(("nope",), "expected some of"), (("dense", "dense"), "2 times")]
)
def test_bad_names(names: tuple[str, ...], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        CLIP.choose(names, "cpu")
