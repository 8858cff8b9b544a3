from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch

from megabatch.similarity.triton import configs
from megabatch.similarity.triton.configs import Config

BEST = Config(rows=16, group=4, stages=4)


class Features:
    """The attributes of a GPU tensor that `configs` reads."""

    is_cuda, dtype, device = True, torch.bfloat16, torch.device("cuda", 0)

    def __init__(self, rows: int, width: int) -> None:
        self.shape = (rows, width)

    def __len__(self) -> int:
        return self.shape[0]

    def element_size(self) -> int:
        return 2


def test_a_config_on_trial_takes_precedence() -> None:
    x = torch.empty(10, 768)
    before = configs.launch_config("forward", x), configs.launch_config("backward", x)
    with patch.dict(configs.overrides, {"forward": BEST}):
        assert configs.launch_config("forward", x) == BEST
        assert configs.launch_config("backward", x) == before[1]
    assert configs.launch_config("forward", x) == before[0]


@pytest.mark.parametrize(("generation", "warps"), [(8, 8), (9, 4), (10, 4)])
def test_warps_by_generation(generation: int, warps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """`compiling` assumes these numbers; before sm_90, 4 warps would spill registers."""
    monkeypatch.setattr(configs, "capability", lambda device: (generation, 0))
    x: Any = Features(4, 768)
    for kernel in ("forward", "backward", "sigmoid"):
        assert configs.launch_config(kernel, x).warps == warps
        assert configs.launch_config(kernel, x).stages == (3 if generation == 9 else 2)


def test_packaged_configs_by_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(configs, "capability", lambda device: (9, 0))

    def packaged(kernel: str, rows: int) -> Config:
        return configs.launch_config(kernel, Features(rows, 512))  # type: ignore[arg-type]

    assert packaged("forward", 8192) == Config(rows=8, group=2)
    assert packaged("forward", 8191) == Config(rows=4, group=4)
    assert packaged("backward", 4) == Config(group=32)
    assert packaged("sigmoid", 4) == Config(group=32)
    assert packaged("soft_targets", 4) == Config(group=32, warps=8)
    assert packaged("soft_targets_backward", 4) == Config(group=32, warps=8, stages=4)
