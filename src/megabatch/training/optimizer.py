"""AdamW with weight decay where OpenCLIP has it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from megabatch.training.config import TrainConfig


def create_optimizer(module: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101) over the trainable parameters."""
    gains, matrices = decay_groups(module)
    groups = [
        {"params": list(gains.values()), "weight_decay": 0.0},
        {"params": list(matrices.values()), "weight_decay": config.wd},
    ]
    betas = (config.beta1, config.beta2)
    return torch.optim.AdamW(
        [g for g in groups if g["params"]], lr=config.lr, betas=betas, eps=config.eps, fused=True
    )


def decay_groups(module: nn.Module) -> tuple[dict[str, nn.Parameter], dict[str, nn.Parameter]]:
    """The trainable parameters without and with weight decay, by name.

    As in OpenCLIP's trainer: no decay for fewer than two dimensions and for names with "bn", "ln",
    "bias" or "logit_scale" in them.
    """
    gains: dict[str, nn.Parameter] = {}
    matrices: dict[str, nn.Parameter] = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            undecayed = any(part in name for part in ("bn", "ln", "bias", "logit_scale"))
            (gains if parameter.ndim < 2 or undecayed else matrices)[name] = parameter
    return gains, matrices


def state_tensors(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's tensors as "parameter name/kind", for example "visual.proj/exp_avg"."""
    return {
        f"{name}/{kind}": value
        for name, parameter in module.named_parameters()
        for kind, value in optimizer.state.get(parameter, {}).items()
    }


def load_state_tensors(
    module: nn.Module, optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]
) -> None:
    """Put back what `state_tensors` gave, for the same module and groups."""
    by_name: dict[str, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        name, kind = key.rsplit("/", 1)
        by_name.setdefault(name, {})[kind] = value
    names = {parameter: name for name, parameter in module.named_parameters()}
    order = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state: dict[str, Any] = optimizer.state_dict()
    state["state"] = {
        i: by_name[names[parameter]]
        for i, parameter in enumerate(order)
        if names[parameter] in by_name
    }
    optimizer.load_state_dict(state)
