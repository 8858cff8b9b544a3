"""A model over several processes: replicated (DDP) or sharded (FSDP2), and its parts made whole.

Precision is autocast's in all three layouts (one process, DDP, FSDP), not FSDP2's
MixedPrecisionPolicy: the same roundings everywhere, so a run can move between layouts; gains,
biases and the logit scale, at 100 off by 0.4% in bf16, are never rounded. The policy would halve
what an all-gather carries, but there is one all-gather a step here: gradient caching holds
unsharded gradients from the first micro-batch to the last, so the unsharded weights stay beside
them (ZeRO-2) rather than to be gathered again for every micro-batch, twice.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from megabatch.models.blocks import blocks
from megabatch.training.world import World


@dataclass(frozen=True)
class Layout:
    """How a module's tensors lie over the ranks.

    module: the module itself, with its own parameter names (sharded in place by FSDP2).
    model: what to call instead of it.
    scalars: names of parameters of shape () that are (1,) here, since FSDP2 shards no scalar.
    """

    module: nn.Module
    model: nn.Module
    world: World
    scalars: frozenset[str] = frozenset()

    def end_step(self) -> None:
        """Free FSDP2's unsharded weights, which the optimizer is about to make stale."""
        for module in self.module.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def gather(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Whole tensors on rank 0's host, in the shapes of one process; nothing on other ranks.

        Every rank has to come, with the same names: "parameter" or, of an optimizer,
        "parameter/kind".
        """
        whole: dict[str, Tensor] = {}
        for key, tensor in tensors.items():
            value = full(tensor)
            if isinstance(tensor, DTensor) and _parameter(key) in self.scalars:
                value = value.reshape(())
            if self.world.main:
                whole[key] = value.detach().cpu()
        return whole

    def scatter(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Each rank's part of rank 0's whole tensors: the inverse of `gather`."""
        parameters = dict(self.module.named_parameters())
        return {
            key: self._part(key, tensor, parameters.get(_parameter(key)))
            for key, tensor in self.world.tensors_from_main(tensors)
        }

    def _part(self, key: str, whole: Tensor, parameter: nn.Parameter | None) -> Tensor:
        # An optimizer's count of steps has the shape of a scalar parameter, and is on every rank.
        if not isinstance(parameter, DTensor) or _is_count(key):
            return whole
        if _parameter(key) in self.scalars and whole.numel() == 1:
            whole = whole.reshape(1)
        if whole.shape != parameter.shape:
            return whole
        mesh, placements = parameter.device_mesh, parameter.placements
        return distribute_tensor(whole, mesh, placements, src_data_rank=None)


def _is_count(key: str) -> bool:
    return key.rsplit("/", 1)[-1].startswith("step") or key.endswith(":number")


def full(tensor: Tensor) -> Tensor:
    """The whole of a tensor that may be sharded; then every rank has to come."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def lay_out(module: nn.Module, how: str, world: World) -> Layout:
    """Spread a module, on its device already, over the ranks; `how`: "ddp" or "fsdp"."""
    if world.size == 1:
        return Layout(module, module, world)
    for tensor in (*module.parameters(), *module.buffers()):
        world.broadcast(tensor.detach(), "the weights at the start")
    if how == "ddp":
        return Layout(module, _replicate(module), world)
    scalars = _scalars_to_vectors(module)
    mesh = init_device_mesh(world.device.type, (world.size,))
    for part in (*blocks(module), module):
        fully_shard(part, mesh=mesh, reshard_after_forward=False)
    assert isinstance(module, FSDPModule)
    module.set_reshard_after_backward(False)
    return Layout(module, module, world, scalars)


def _replicate(module: nn.Module) -> DistributedDataParallel:
    # Buffers stay each rank's own (running statistics; the checkpoint has rank 0's): DDP would send
    # them before the forward passes of a step, which in training read none of them. The option has
    # another name in newer torch.
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    name = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    options: dict[str, Any] = {name: False, "gradient_as_bucket_view": True}
    return DistributedDataParallel(module, **options)


def running_statistics(module: nn.Module) -> list[Tensor]:
    """The buffers in which batch normalisation follows the data: each rank's own."""
    return [
        buffer
        for part in module.modules()
        if getattr(part, "track_running_stats", False)
        for buffer in part.buffers(recurse=False)
    ]


def _scalars_to_vectors(module: nn.Module) -> frozenset[str]:
    names = [name for name, parameter in module.named_parameters() if parameter.ndim == 0]
    for name in names:
        owner, _, attribute = name.rpartition(".")
        holder = module.get_submodule(owner)
        old = getattr(holder, attribute)
        new = nn.Parameter(old.detach().reshape(1), requires_grad=old.requires_grad)
        setattr(holder, attribute, new)
    return frozenset(names)


def _parameter(key: str) -> str:
    return key.split("/", 1)[0]


def gradient_norm(parameters: list[nn.Parameter]) -> Tensor:
    """The norm of the whole gradient, over all shards; the same on every rank."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    return full(torch.nn.utils.get_total_norm(gradients))
