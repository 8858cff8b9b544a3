"""A registry entry is enough for the trainer and the planner to use a loss."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from megabatch import losses
from megabatch.config.problems import conflicts
from megabatch.losses.objective import create_objective
from megabatch.losses.registry import TRAINABLE, LossEntry, describe_duplicates, describe_losses
from megabatch.models import ModelOptions
from megabatch.planning.loss import loss_seconds
from megabatch.planning.simulation.hardware import gpu_named
from megabatch.training import TrainConfig


class Mine(nn.Module):
    """A loss whose value depends on every setting of its entry."""

    def __init__(self, weight: float, kind: str = "plain", group: object = None) -> None:
        super().__init__()
        self.weight, self.kind, self.group = weight, kind, group

    def forward(
        self, x: Tensor, y: Tensor, temperature: Tensor, logit_bias: Tensor, ids: Tensor
    ) -> Tensor:
        return self.weight * (x * y).sum() / temperature + logit_bias + ids.sum()


ENTRY = LossEntry(
    name="Mine",
    purpose="a test",
    paper="none",
    arxiv="",
    option="mine",
    summary="a test",
    work=5,
    scale_as="temperature",
    takes_bias=True,
    initial_scale=1.5,
    duplicates={"ignored": {"kind": "special"}},
    settings={"infonce_margin": "weight"},
)
CONFIG = replace(TrainConfig(), loss="mine", duplicates="ignored", infonce_margin=0.5)


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TRAINABLE, "mine", ENTRY)
    monkeypatch.setattr(losses, "Mine", Mine, raising=False)


def test_the_objective_passes_settings_scale_bias_and_ids() -> None:
    objective = create_objective(CONFIG, group="local")
    assert isinstance(objective.loss, Mine)
    assert (objective.loss.weight, objective.loss.kind) == (0.5, "special")
    assert objective.loss.group == "local"
    x, ids = torch.ones(2, 3), torch.tensor([4, 5])
    value = objective(x, x, torch.tensor(10.0), torch.tensor(-1.0), ids=ids)
    assert value.item() == 0.5 * 6 * 10 - 1 + 9


def test_settings_are_refused_for_other_losses() -> None:
    def reasons(**changes: object) -> list[str]:
        changed = replace(CONFIG, **changes)  # type: ignore[arg-type]
        return [conflict.reason for conflict in conflicts(changed)]

    assert reasons() == reasons(loss="infonce") == []
    expected = [
        "--infonce-margin 0.5: --loss clip does not use it; expected --loss infonce or --loss mine"
    ]
    assert reasons(loss="clip") == expected
    expected = ["--duplicates negatives: the mine loss can take them for ignored"]
    assert reasons(duplicates="negatives") == expected


def test_model_planner_and_help_list_it() -> None:
    options = ModelOptions.of({"loss": "mine"})
    assert (options.init_logit_scale, options.init_logit_bias) == (1.5, None)
    config = replace(CONFIG, loss="clip")
    mine, clip = (loss_seconds(c, 512, gpu_named("NVIDIA H200"), 1) for c in (CONFIG, config))
    assert mine == pytest.approx(5 / 8 * clip)
    assert "; mine: a test." in describe_losses()
    assert "; mine: ignored." in describe_duplicates()
