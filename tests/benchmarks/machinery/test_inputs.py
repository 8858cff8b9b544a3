from __future__ import annotations

import pytest
import torch

from machinery import inputs
from machinery.inputs import FEATURES, features


def test_features_are_pairs_of_unit_length() -> None:
    x, y = features(5000, 64, torch.float32, "cpu")
    torch.testing.assert_close(x.norm(dim=1), torch.ones(5000))
    torch.testing.assert_close(y.norm(dim=1), torch.ones(5000))
    assert (x * y).sum(1).mean() == pytest.approx(0.5, abs=0.01)
    assert (x * y.roll(1, 0)).sum(1).mean() == pytest.approx(0, abs=0.01)
    assert not (x[:904] == x[4096:]).any()  # the next strip repeats nothing


@pytest.mark.parametrize("kind", FEATURES)
def test_unit_rows_the_same_every_time_whatever_the_other_side(kind: str) -> None:
    x, y = features(300, 64, torch.float32, "cpu", kind)
    torch.testing.assert_close(x.norm(dim=1), torch.ones(300))
    torch.testing.assert_close(y.norm(dim=1), torch.ones(300))
    fewer, longer = features(300, 64, torch.float32, "cpu", kind), (x, y)
    torch.testing.assert_close(fewer, longer, rtol=0, atol=0)
    x, y = features(300, 64, torch.float32, "cpu", kind, n=20)
    assert x.shape == (300, 64)
    assert y.shape == (20, 64)


def test_what_the_kinds_promise() -> None:
    x, y = features(2000, 256, torch.float64, "cpu", "trained")
    own = (x * y).sum(1)
    assert 0.29 < own.min() < 0.32
    assert 0.88 < own.max() < 0.91
    other = (x @ x.T).fill_diagonal_(0)
    assert other.max() == pytest.approx(0.64, abs=0.2)
    x, y = features(500, 256, torch.float64, "cpu", "opposed")
    torch.testing.assert_close((x * y).sum(1), torch.full((500,), -0.5).double(), rtol=0, atol=1e-6)
    x, y = features(500, 256, torch.float64, "cpu", "antipodal")
    assert (x @ y.T).max() < -0.85


def test_repeats_after_the_period(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "PERIOD", 32)
    x, y = features(80, 8, torch.float32, "cpu", n=40)
    once = features(32, 8, torch.float32, "cpu")
    assert torch.equal(x, torch.cat([once[0], once[0], once[0][:16]]))
    assert torch.equal(y, torch.cat([once[1], once[1][:8]]))
