"""Which parameters decay, and that the optimizer's state survives by name."""

from __future__ import annotations

import torch
from torch import nn

from megabatch.models import create
from megabatch.training import TrainConfig
from megabatch.training.optimizer import (
    create_optimizer,
    decay_groups,
    load_state_tensors,
    state_tensors,
)
from tests.models.tiny import TINY


def test_an_open_clip_models_groups_are_open_clips() -> None:
    module = create(TINY).module
    gains, matrices = decay_groups(module)
    assert len(gains) + len(matrices) == len(list(module.parameters()))
    assert {"logit_scale", "visual.class_embedding", "visual.ln_pre.weight"} <= gains.keys()
    assert {"ln_final.bias", "transformer.resblocks.0.attn.in_proj_bias"} <= gains.keys()
    assert {"visual.proj", "text_projection", "token_embedding.weight"} <= matrices.keys()
    assert {"positional_embedding", "transformer.resblocks.0.mlp.c_fc.weight"} <= matrices.keys()


def test_names_decide_even_for_matrices_and_frozen_parameters_are_left_out() -> None:
    module = nn.Module()
    for name in ("weight", "bn_table", "ln_table", "bias_table", "frozen", "gain"):
        module.register_parameter(name, nn.Parameter(torch.zeros(2, 2)))
    module.gain = nn.Parameter(torch.zeros(2))
    module.frozen.requires_grad_(False)
    gains, matrices = decay_groups(module)
    assert set(gains) == {"bn_table", "ln_table", "bias_table", "gain"}
    assert set(matrices) == {"weight"}


def test_only_matrices_shrink() -> None:
    module = nn.Linear(2, 2)
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    optimizer = create_optimizer(module, TrainConfig(lr=0.5, wd=0.1))
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    torch.testing.assert_close(module.weight.detach(), before["weight"] * (1 - 0.5 * 0.1))
    assert torch.equal(module.bias.detach(), before["bias"])


def stepped(module: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    torch.manual_seed(seed)
    for parameter in module.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()


def test_state_put_back_by_name_continues_exactly() -> None:
    config = TrainConfig(lr=0.1)
    first, second = nn.Linear(3, 2), nn.Linear(3, 2)
    optimizer = create_optimizer(first, config)
    stepped(first, optimizer, 1)
    tensors = {name: value.clone() for name, value in state_tensors(first, optimizer).items()}
    assert set(tensors) == {
        f"{name}/{kind}"
        for name in ("weight", "bias")
        for kind in ("step", "exp_avg", "exp_avg_sq")
    }
    second.load_state_dict(first.state_dict())
    other = create_optimizer(second, config)
    load_state_tensors(second, other, tensors)
    stepped(first, optimizer, 2)
    stepped(second, other, 2)
    assert torch.equal(first.weight, second.weight)
    assert torch.equal(first.bias, second.bias)
