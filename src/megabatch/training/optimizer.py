"""Optimizers by name, their parameter groups, their state by name, and the learning rate."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from megabatch.config.settings import TrainConfig

#: Steps of the warm-up of a run that is long enough and sets none.
DEFAULT_WARMUP = 20

_GROUP = "param_groups."


def create_optimizer(module: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """The optimizer that `config.opt` names, over the trainable parameters.

    "adamw" (Loshchilov and Hutter 2019, arXiv 1711.05101) is torch's, fused; "sgd" is torch's, with
    Nesterov momentum. The others are timm's, which update several
    tensors at once where its release can: "lamb" (You et al. 2020, arXiv 1904.00962), with its
    internal gradient clipping off, so that only `grad_clip_norm` clips; "lars" (You et al. 2017,
    arXiv 1708.03888); "adafactor" (Shazeer and Stern 2018, arXiv 1804.04235) as in Big Vision (Zhai
    et al. 2022, arXiv 2106.04560), one tensor at a time, with a first moment in bfloat16 unless
    beta1 is 0; "lion" (Chen et al. 2023, arXiv 2302.06675).
    """
    groups = parameter_groups(module, config)
    lr, betas = config.lr, (config.beta1, config.beta2)
    if config.opt == "adamw":
        return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=config.eps, fused=True)
    if config.opt == "sgd":
        # Not fused: DTensors have no such SGD, and after a first step that an fp16 overflow skips
        # its momentum is uninitialised.
        nesterov = config.momentum > 0
        return torch.optim.SGD(groups, lr=lr, momentum=config.momentum, nesterov=nesterov)
    from timm import optim  # imports torchvision, which the others do not need

    if config.opt == "lamb":
        return optim.Lamb(groups, lr=lr, betas=betas, eps=config.eps, max_grad_norm=None)
    if config.opt == "lars":
        return optim.Lars(groups, lr=lr, momentum=config.momentum)
    if config.opt == "adafactor":
        return optim.AdafactorBigVision(groups, lr=lr, momentum=config.beta1 or None)
    return optim.Lion(groups, lr=lr, betas=betas)


def parameter_groups(module: nn.Module, config: TrainConfig) -> list[dict[str, Any]]:
    """The trainable parameters, grouped by weight decay, for an optimizer.

    As in OpenCLIP's trainer, parameters with fewer than two dimensions, and those whose names
    contain "bn", "ln", "bias" or "logit_scale", have no decay.
    """
    gains: list[nn.Parameter] = []
    matrices: list[nn.Parameter] = []
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            undecayed = any(part in name for part in ("bn", "ln", "bias", "logit_scale"))
            (gains if parameter.ndim < 2 or undecayed else matrices).append(parameter)
    return [
        {"params": parameters, "weight_decay": decay}
        for parameters, decay in ((gains, 0.0), (matrices, config.wd))
        if parameters
    ]


def state_tensors(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's full state as tensors by name.

    Keys are "parameter name/kind", for example "visual.proj/exp_avg", and "param_groups.0/kind" for
    the state of a whole group. An int is a tensor of shape () whose key ends in ":number".
    """
    entries = {
        f"{name}/{kind}": value
        for name, parameter in module.named_parameters()
        for kind, value in optimizer.state.get(parameter, {}).items()
    }
    for i, group in enumerate(optimizer.param_groups):
        counted = group.keys() - optimizer.defaults.keys() - {"params"}  # no setting, but state
        entries |= {f"{_GROUP}{i}/{kind}": group[kind] for kind in sorted(counted)}
    return dict(_as_tensor(key, value) for key, value in entries.items() if value is not None)


def load_state_tensors(
    module: nn.Module, optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]
) -> None:
    """Restore from `state_tensors` of the same module and groups.

    FSDP2's parameters expect theirs sharded in the same way, see `Layout.scatter`.
    """
    by_name: dict[str, dict[str, Any]] = {}
    for key, tensor in tensors.items():
        name, kind = key.rsplit("/", 1)
        number = kind.endswith(":number")
        value = tensor.item() if number else tensor
        by_name.setdefault(name, {})[kind.removesuffix(":number")] = value
    names = {parameter: name for name, parameter in module.named_parameters()}
    order = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state: dict[str, Any] = optimizer.state_dict()
    state["state"] = {
        i: by_name[names[parameter]]
        for i, parameter in enumerate(order)
        if names[parameter] in by_name
    }
    for i, group in enumerate(state["param_groups"]):
        group |= by_name.get(f"{_GROUP}{i}", {})
    optimizer.load_state_dict(state)


def _as_tensor(key: str, value: Any) -> tuple[str, Tensor]:
    if isinstance(value, Tensor):
        return key, value
    if isinstance(value, int):
        return f"{key}:number", torch.tensor(value)
    raise TypeError(f"{key}: expected a tensor or an int, got {type(value).__name__}")


def learning_rate(config: TrainConfig, step: int, total_steps: int) -> float:
    """The learning rate of step `step` (from 0) of `total_steps`, as in OpenCLIP.

    It rises linearly to the peak in `warmup_steps`. Then "cosine" follows half a cosine that
    would reach zero at `total_steps`; "const" stays constant; "const-cooldown" (also called "wsd",
    warm-up, stable, decay: Hu et al. 2024, arXiv 2404.06395) stays constant until the last
    `cooldown_steps`, in which it decays linearly to zero.
    """
    peak, warmup = config.lr, warmup_steps(config, total_steps)
    if step < warmup:
        return peak * (step + 1) / warmup
    if config.lr_scheduler == "const":
        return peak
    if config.lr_scheduler == "cosine":
        done = (step - warmup) / (total_steps - warmup)
        return peak * (1 + math.cos(math.pi * done)) / 2
    length = cooldown_steps(config, total_steps)
    into = step - (total_steps - length)
    return peak if into < 0 else peak * (1 - into / length)


def warmup_steps(config: TrainConfig, total_steps: int) -> int:
    """Steps of the warm-up; by default 20, at most a fifth of those before a given cooldown."""
    if config.warmup is not None:
        return config.warmup
    return min(DEFAULT_WARMUP, (total_steps - (config.lr_cooldown or 0)) // 5)


def cooldown_steps(config: TrainConfig, total_steps: int) -> int:
    """Steps of the cooldown; by default a fifth of the run, at most those after the warm-up."""
    if config.lr_cooldown is not None:
        return config.lr_cooldown
    return max(1, min(total_steps // 5, total_steps - warmup_steps(config, total_steps)))
