"""A model over several processes: replicated (DDP) or sharded (FSDP2).

All layouts (one process, DDP, FSDP) use autocast rather than FSDP2's MixedPrecisionPolicy. Rounding
is then the same, so a run can move between layouts, and gains, biases and the logit scale (at 100,
0.4% off in bf16) are never rounded. The policy would halve the all-gather's traffic, but there is
only one all-gather per step: gradient caching keeps unsharded gradients from the first micro-batch
to the last, and keeps the unsharded weights with them (ZeRO-2) instead of gathering them twice for
every micro-batch.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from megabatch.models.blocks import blocks
from megabatch.training.world import World


@dataclass(frozen=True)
class Layout:
    """A module laid out over the ranks.

    Attributes:
        module: the module with its own parameter names (sharded in place by FSDP2).
        model: the module to call, such as DDP's wrapper.
        world: the ranks.
        scalars: names of parameters of shape () that are (1,) here, as FSDP2 shards no scalars.
    """

    module: nn.Module
    model: nn.Module
    world: World
    scalars: frozenset[str] = frozenset()

    def end_step(self) -> None:
        """Free FSDP2's unsharded weights, which the optimizer's step makes stale."""
        for module in fsdp_modules(self.module):
            module.reshard()

    def gather_weights(self) -> None:
        """Make FSDP2's weights whole on all ranks, as a forward pass does."""
        for module in fsdp_modules(self.module):
            module.unshard()

    def gather(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Full tensors on rank 0's host, in the shapes of one process; {} on other ranks.

        All ranks must call this, with the same names: "parameter" or, for an optimizer's state,
        "parameter/kind".
        """
        whole: dict[str, Tensor] = {}
        for key, tensor in tensors.items():
            with self.world.failures(f"gathering {key}"):
                value = full(tensor)
            if isinstance(tensor, DTensor) and _parameter(key) in self.scalars:
                value = value.reshape(())
            if self.world.main:
                whole[key] = value.detach().cpu()
        return whole

    def scatter(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """This rank's part of rank 0's full tensors: the inverse of `gather`."""
        parameters = dict(self.module.named_parameters())
        return {
            key: self._part(key, tensor, parameters.get(_parameter(key)))
            for key, tensor in self.world.tensors_from_main(tensors)
        }

    def _part(self, key: str, whole: Tensor, parameter: nn.Parameter | None) -> Tensor:
        kind = key.rsplit("/", 1)[-1]
        # An optimizer's step count has the shape of a scalar parameter, but is not sharded.
        is_count = kind.startswith("step") or kind.endswith(":number")
        if not isinstance(parameter, DTensor) or is_count:
            return whole
        if _parameter(key) in self.scalars and whole.numel() == 1:
            whole = whole.reshape(1)
        if whole.ndim != parameter.ndim:
            return whole
        # new_zeros, as in timm: Adafactor's factors have other shapes than the parameter.
        like: Any = parameter.detach().new_zeros(whole.shape)
        return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)


def full(tensor: Tensor) -> Tensor:
    """The full tensor of a DTensor, for which all ranks must call this; others as they are."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def lay_out(module: nn.Module, how: str, world: World) -> Layout:
    """Wrap or shard a module that is on its device; `how` is "ddp" or "fsdp"."""
    if world.size == 1:
        return Layout(module, module, world)
    for tensor in (*module.parameters(), *module.buffers()):
        world.broadcast(tensor.detach(), "the weights at the start")
    if how == "ddp":
        return Layout(module, _replicate(module), world)
    scalars = _scalars_to_vectors(module)
    mesh = init_device_mesh(world.device.type, (world.size,))
    for part in (*blocks(module), module):  # each block in a group of its own
        fully_shard(part, mesh=mesh, reshard_after_forward=False)
    assert isinstance(module, FSDPModule)
    module.set_reshard_after_backward(False)
    return Layout(module, module, world, scalars)


def fsdp_modules(module: nn.Module) -> list[FSDPModule]:
    """The modules that FSDP2 shards, this one first."""
    return [part for part in module.modules() if isinstance(part, FSDPModule)]


def _replicate(module: nn.Module) -> DistributedDataParallel:
    # Each rank keeps its own buffers, such as running statistics (a checkpoint has rank 0's). DDP
    # would broadcast them before each step's forward passes, which do not read them in training.
    # Newer torch has another name for the option.
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    name = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    options: dict[str, Any] = {name: False, "gradient_as_bucket_view": True}
    return DistributedDataParallel(module, **options)


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
