"""The moving average of the weights against its formula, and what is kept of it."""

from __future__ import annotations

import copy

import torch
from torch import nn

from megabatch.training.ema import Ema


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


def test_a_decay_of_zero_is_the_weights_themselves() -> None:
    module = nn.Linear(3, 2)
    ema = Ema(module, 0.0)
    moved(module, 1)
    ema.update(1)
    assert torch.equal(ema.model_state()["weight"], module.weight)


def test_the_export_has_all_of_the_model_and_only_trained_weights_are_means() -> None:
    module = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    module[0].bias.requires_grad_(False)
    ema = Ema(module, 0.9)
    assert ema.state_tensors().keys() == {"0.weight/ema", "1.weight/ema", "1.bias/ema"}
    start = module[0].weight.detach().clone()
    moved(module, 1)
    module(torch.randn(5, 3))  # moves the running statistics
    state = ema.model_state()
    assert list(state) == list(module.state_dict())
    assert torch.equal(state["0.weight"], start)
    for name in ("0.bias", "1.running_mean", "1.num_batches_tracked"):
        assert torch.equal(state[name], module.state_dict()[name])
    copy.deepcopy(module).load_state_dict(state)


def test_weights_in_half_precision_are_averaged_in_full() -> None:
    module = nn.Linear(3, 2).bfloat16()
    ema = Ema(module, 0.999)
    assert ema.state_tensors()["weight/ema"].dtype == torch.float32
    assert ema.model_state()["weight"].dtype == torch.bfloat16


def test_put_back_it_goes_on_bit_for_bit() -> None:
    module = nn.Linear(3, 2)
    first = Ema(module, 0.9)
    for step in (1, 2):
        moved(module, step)
        first.update(step)
    second = Ema(module, 0.9)
    saved = {name: tensor.clone() for name, tensor in first.state_tensors().items()}
    others = {"weight/exp_avg": torch.zeros(2)}
    assert second.load_state_tensors(saved | others).keys() == others.keys()
    moved(module, 3)
    for ema in (first, second):
        ema.update(3)
    for name, mean in first.state_tensors().items():
        assert torch.equal(mean, second.state_tensors()[name])
