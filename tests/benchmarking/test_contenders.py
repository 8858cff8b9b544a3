from __future__ import annotations

import pytest
import torch

from megabatch.benchmarking import contenders, truth
from megabatch.benchmarking.contenders import CLIP, Contender
from megabatch.benchmarking.inputs import features
from megabatch.errors import UsageError


@pytest.mark.parametrize("name", CLIP.contenders)
def test_every_contender_is_the_loss(name: str) -> None:
    (contender,) = CLIP.choose((name,))
    x, y = (t.requires_grad_() for t in features(20, 8, torch.float64, "cpu"))
    scale = torch.tensor(30.0, dtype=torch.float64, requires_grad=True)
    loss = contender.load()(x, y, scale)
    loss.backward()
    exact = truth.clip(x.detach(), y.detach(), 30.0)
    for mine, theirs in zip((loss.detach(), x.grad, y.grad, scale.grad), exact, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-11)


def test_none_named_means_all_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = Contender("gone", "", lambda: contenders.two_products, ("no_such_module", "gone"))
    monkeypatch.setitem(CLIP.contenders, "gone", missing)
    assert [c.name for c in CLIP.choose(())] == [n for n in CLIP.contenders if n != "gone"]
    with pytest.raises(UsageError, match="pip install gone"):
        CLIP.choose(("gone",))


def test_order_of_the_names_is_kept() -> None:
    assert [c.name for c in CLIP.choose(("dense", "megabatch"))] == ["dense", "megabatch"]


@pytest.mark.parametrize(
    ("names", "words"), [(("nope",), "expected some of"), (("dense", "dense"), "2 times")]
)
def test_bad_names(names: tuple[str, ...], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        CLIP.choose(names)
