"""Optimizers by name, the groups that their settings differ by, and their state by name."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from megabatch.config.settings import TrainConfig
from megabatch.models.layers import layer_ids

# A group's own settings; whatever else it has that is no default of the optimizer is state.
_SETTINGS = ("params", "lr_scale")
_GROUP = "param_groups."


def create_optimizer(module: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """The optimizer that `config.opt` names, over the trainable parameters.

    Each group has "lr_scale", a factor of the learning rate (see `set_learning_rate`).

    "adamw": Loshchilov and Hutter 2019, arXiv 1711.05101, torch's fused one. The others but "sgd"
    are timm's: "lamb", You et al. 2020, arXiv 1904.00962, without the clipping inside that it has
    there, so that `grad_clip_norm` alone decides; "lars", You et al. 2017, arXiv 1708.03888;
    "adafactor", Shazeer and Stern 2018, arXiv 1804.04235, as in Big Vision (Zhai et al. 2022, arXiv
    2106.04560), with a first moment in bfloat16 unless beta1 is 0; "lion", Chen et al. 2023, arXiv
    2302.06675. "sgd": torch's, with Nesterov's momentum.
    """
    groups = parameter_groups(module, config)
    lr, betas = config.lr, (config.beta1, config.beta2)
    if config.opt == "adamw":
        return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=config.eps, fused=True)
    if config.opt == "sgd":
        nesterov = config.momentum > 0
        return torch.optim.SGD(groups, lr=lr, momentum=config.momentum, nesterov=nesterov)
    from timm import optim  # brings torchvision along: for those who need it

    if config.opt == "lamb":
        return optim.Lamb(groups, lr=lr, betas=betas, eps=config.eps, max_grad_norm=None)
    if config.opt == "lars":
        return optim.Lars(groups, lr=lr, momentum=config.momentum)
    if config.opt == "adafactor":
        return optim.AdafactorBigVision(groups, lr=lr, momentum=config.beta1 or None)
    return optim.Lion(groups, lr=lr, betas=betas)


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Give each group the learning rate, times its own factor."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_scale"]


def parameter_groups(module: nn.Module, config: TrainConfig) -> list[dict[str, Any]]:
    """The trainable parameters by weight decay and, with `config.layer_decay`, by layer.

    A layer's learning rate is `layer_decay` times that of the layer above it, in each tower by
    itself (Howard and Ruder 2018, arXiv 1801.06146; in timm and OpenCLIP's fine-tuning as here);
    scale and bias have the whole rate.
    """
    ids = {} if config.layer_decay is None else layer_ids(module)
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for decay, named in zip((0.0, config.wd), decay_groups(module), strict=True):
        for name, parameter in named.items():
            layer, last = ids.get(name, (0, 0))
            scale = 1.0 if layer == last else (config.layer_decay or 1.0) ** (last - layer)
            groups.setdefault((decay, scale), []).append(parameter)
    return [
        {"params": parameters, "weight_decay": decay, "lr_scale": scale}
        for (decay, scale), parameters in groups.items()
    ]


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
    """The optimizer's whole state as tensors by name.

    "parameter name/kind", for example "visual.proj/exp_avg"; what a group as a whole counts is
    "param_groups.0/kind". A plain number is a tensor of shape () whose key ends in ":number".
    """
    entries = {
        f"{name}/{kind}": value
        for name, parameter in module.named_parameters()
        for kind, value in optimizer.state.get(parameter, {}).items()
    }
    for i, group in enumerate(optimizer.param_groups):
        counted = group.keys() - optimizer.defaults.keys() - set(_SETTINGS)
        entries |= {f"{_GROUP}{i}/{kind}": group[kind] for kind in sorted(counted)}
    return dict(_as_tensor(key, value) for key, value in entries.items() if value is not None)


def load_state_tensors(
    module: nn.Module, optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]
) -> None:
    """Put back what `state_tensors` gave, for the same module and groups.

    Where FSDP2 shards a parameter, its state may be sharded like it, or whole.
    """
    by_name: dict[str, dict[str, Any]] = {}
    for key, tensor in tensors.items():
        name, kind = key.rsplit("/", 1)
        number = kind.endswith(":number")
        value = tensor.item() if number else tensor
        by_name.setdefault(name, {})[kind.removesuffix(":number")] = value
    names = {parameter: name for name, parameter in module.named_parameters()}
    for parameter, name in names.items():
        kinds = by_name.get(name, {})
        by_name[name] = {kind: _laid_out(value, parameter) for kind, value in kinds.items()}
    order = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state: dict[str, Any] = optimizer.state_dict()
    state["state"] = {
        i: by_name[names[parameter]]
        for i, parameter in enumerate(order)
        if by_name[names[parameter]]
    }
    for i, group in enumerate(state["param_groups"]):
        group |= by_name.get(f"{_GROUP}{i}", {})
    optimizer.load_state_dict(state)


def _laid_out(value: Any, parameter: nn.Parameter) -> Any:
    """A state of the parameter as the optimizer would have made it: sharded or not."""
    made_like_it = isinstance(value, Tensor) and value.ndim == parameter.ndim
    if not (made_like_it and isinstance(parameter, DTensor)) or isinstance(value, DTensor):
        return value
    # Of another shape than the parameter's are Adafactor's factors, which timm makes by new_zeros.
    like = parameter.detach().new_zeros(value.shape)
    assert isinstance(like, DTensor)
    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)


def _as_tensor(key: str, value: Any) -> tuple[str, Tensor]:
    if isinstance(value, Tensor):
        return key, value
    if isinstance(value, int):
        return f"{key}:number", torch.tensor(value, dtype=torch.int64)
    if isinstance(value, float):
        return f"{key}:number", torch.tensor(value, dtype=torch.float64)
    raise TypeError(f"{key}: expected a tensor or a number, got {type(value).__name__}")
