"""Optimizers, their groups and state; the learning rate; the moving average of the weights."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from megabatch.models import create
from megabatch.training import TrainConfig
from megabatch.training.checkpoint import save_tensors
from megabatch.training.ema import Ema
from megabatch.training.optimizer import (
    cooldown_steps,
    create_optimizer,
    learning_rate,
    load_state_tensors,
    parameter_groups,
    state_tensors,
    warmup_steps,
)
from tests.models.tiny import TINY

NAMES: tuple[str, ...] = get_args(get_type_hints(TrainConfig)["opt"])


def small() -> nn.Module:
    """With matrices that Adafactor factors (16 and more) and such that it does not."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(33, 40), nn.LayerNorm(40), nn.Linear(40, 5, bias=False))


def give_gradients(module: nn.Module, seed: int) -> None:
    torch.manual_seed(seed)
    for parameter in module.parameters():
        parameter.grad = torch.randn_like(parameter)


def names_by_decay(module: nn.Module) -> dict[float, set[str]]:
    names = {parameter: name for name, parameter in module.named_parameters()}
    groups = parameter_groups(module, TrainConfig(wd=0.1))
    return {group["weight_decay"]: {names[p] for p in group["params"]} for group in groups}


def test_an_open_clip_models_groups_are_open_clips() -> None:
    module = create(TINY).module
    found = names_by_decay(module)
    assert sum(map(len, found.values())) == len(list(module.parameters()))
    assert {"logit_scale", "visual.class_embedding", "visual.ln_pre.weight"} <= found[0.0]
    assert {"ln_final.bias", "transformer.resblocks.0.attn.in_proj_bias"} <= found[0.0]
    assert {"visual.proj", "text_projection", "token_embedding.weight"} <= found[0.1]
    assert {"positional_embedding", "transformer.resblocks.0.mlp.c_fc.weight"} <= found[0.1]


def test_names_decide_even_for_matrices_and_frozen_parameters_are_left_out() -> None:
    module = nn.Module()
    for name in ("weight", "bn_table", "ln_table", "bias_table", "frozen", "gain"):
        module.register_parameter(name, nn.Parameter(torch.zeros(2, 2)))
    module.gain = nn.Parameter(torch.zeros(2))
    module.frozen.requires_grad_(False)
    assert names_by_decay(module) == {
        0.0: {"bn_table", "ln_table", "bias_table", "gain"},
        0.1: {"weight"},
    }


@pytest.mark.parametrize("changes", [{}, {"beta1": 0.0, "momentum": 0.0}])
@pytest.mark.parametrize("name", NAMES)
def test_state_put_back_from_the_disk_continues_bit_for_bit(
    name: str, changes: dict[str, float], tmp_path: Path
) -> None:
    config = TrainConfig(opt=name, lr=0.1, **changes)  # type: ignore[arg-type]
    first = small()
    optimizer = create_optimizer(first, config)
    for seed in range(3):
        give_gradients(first, seed)
        optimizer.step()
    save_tensors(state_tensors(first, optimizer), tmp_path / "optimizer.safetensors")
    tensors = load_file(tmp_path / "optimizer.safetensors")
    second = copy.deepcopy(first)
    other = create_optimizer(second, config)
    load_state_tensors(second, other, tensors)
    again = state_tensors(second, other)
    assert again.keys() == tensors.keys()
    assert all(again[key].dtype == tensors[key].dtype for key in tensors)
    for seed in range(3, 6):
        for module, one in ((first, optimizer), (second, other)):
            give_gradients(module, seed)
            one.step()
    for one, two in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(one, two)


def test_lamb_is_as_published_and_clips_nothing() -> None:
    module = nn.Linear(4, 3, bias=False)
    before = module.weight.detach().clone()
    config = TrainConfig(opt="lamb", lr=0.5, wd=0.1, beta1=0.0, beta2=0.0, eps=1e-12)
    optimizer = create_optimizer(module, config)
    module.weight.grad = 1e4 * torch.ones_like(module.weight)
    optimizer.step()
    direction = torch.ones(3, 4) + 0.1 * before  # Adam's first step, and the decay
    step = 0.5 * before.norm() / direction.norm() * direction
    torch.testing.assert_close(module.weight.detach(), before - step)


ROOT = 0.5**0.5
WSD = {"lr_scheduler": "wsd", "lr_cooldown": 4, "warmup": 0}


@pytest.mark.parametrize(
    ("changes", "rates"),
    [
        ({"lr": 8.0, "warmup": 4, "lr_scheduler": "const"}, [2, 4, 6, 8, 8, 8]),
        ({"lr": 3.0, "warmup": 3}, [1, 2, 3]),  # all warm-up
        # Half a cosine from the peak towards zero, which the step after the last would have.
        ({"lr": 4.0, "warmup": 0}, [4, 2 + 2 * ROOT, 2, 2 - 2 * ROOT]),
        # OpenCLIP: the step after the last has zero.
        ({"lr": 4.0, **WSD, "warmup": 2}, [2, 4, 4, 4, 4, 4, 4, 3, 2, 1]),
        ({**WSD, "lr_scheduler": "const-cooldown"}, [1, 1, 1, 0.75, 0.5, 0.25]),
    ],
)
def test_learning_rates_of_all_steps(changes: dict[str, Any], rates: list[float]) -> None:
    config = TrainConfig(**{"lr": 1.0, **changes})
    found = [learning_rate(config, step, len(rates)) for step in range(len(rates))]
    assert found == pytest.approx(rates)


@pytest.mark.parametrize(
    ("steps", "expected"), [(1, 0), (4, 0), (6, 1), (19, 3), (20, 4), (25, 5), (99, 19), (500, 20)]
)
def test_the_default_warm_up_is_at_most_a_fifth_of_the_run(steps: int, expected: int) -> None:
    assert warmup_steps(TrainConfig(), steps) == expected
    rates = [learning_rate(TrainConfig(lr=1.0), step, steps) for step in range(steps)]
    assert rates.index(max(rates)) == max(expected - 1, 0)
    assert min(rates[expected:]) < 0.2 or steps < 5  # the cosine has its room


def test_defaults_of_warm_up_and_cooldown_leave_each_other_room() -> None:
    assert warmup_steps(TrainConfig(lr_scheduler="wsd", lr_cooldown=20), 30) == 2
    assert warmup_steps(TrainConfig(warmup=9), 10) == 9
    config = TrainConfig(lr_scheduler="wsd", warmup=10)
    assert [cooldown_steps(config, steps) for steps in (100, 11, 10)] == [20, 1, 1]
    assert learning_rate(config, 9, 10) == config.lr


def moved(module: nn.Module, seed: int) -> None:
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter))


def test_the_mean_is_the_recursion_with_a_decay_that_rises() -> None:
    module = nn.Linear(3, 2)
    ema = Ema(module, 0.3)
    expected = module.weight.detach().clone()
    for step, decay in enumerate([2 / 11, 3 / 12, 0.3, 0.3], start=1):  # (1 + t) / (10 + t) first
        moved(module, step)
        ema.update(step)
        expected = decay * expected + (1 - decay) * module.weight.detach()
    torch.testing.assert_close(ema.state_tensors()["weight/ema"], expected)


def test_the_export_has_all_of_the_model_and_only_trained_weights_are_means() -> None:
    module = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    module[0].bias.requires_grad_(False)
    ema = Ema(module, 0.9)
    assert ema.state_tensors().keys() == {"0.weight/ema", "1.weight/ema", "1.bias/ema"}
    half = Ema(nn.Linear(3, 2).bfloat16(), 0.999)
    assert half.state_tensors()["weight/ema"].dtype == torch.float32
    assert half.model_state()["weight"].dtype == torch.bfloat16
    start = module[0].weight.detach().clone()
    moved(module, 1)
    module(torch.randn(5, 3))  # moves the running statistics
    state = ema.model_state()
    assert list(state) == list(module.state_dict())
    assert torch.equal(state["0.weight"], start)
    for name in ("0.bias", "1.running_mean", "1.num_batches_tracked"):
        assert torch.equal(state[name], module.state_dict()[name])
    copy.deepcopy(module).load_state_dict(state)
