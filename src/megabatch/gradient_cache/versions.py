"""Whether tensors that the second pass uses were changed in place since the first."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from megabatch.gradient_cache.batches import leaves
from megabatch.torch_internals import version_of


class Versions:
    """The versions of an encoder's parameters and batches, as they are when it is made."""

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        batches: Mapping[str, Any],
        wrappers: Collection[nn.Module],
    ) -> None:
        """Both by name, for messages; rows that are made when asked for have no version."""
        # FSDP2 writes whole parameters in the place of shards as it needs them.
        sharded = any(not isinstance(wrapper, DistributedDataParallel) for wrapper in wrappers)
        named = {
            f"parameter {name}": parameter
            for name, parameter in parameters.items()
            if not sharded or hasattr(parameter, "device_mesh")
        }
        for name, batch in batches.items():
            named |= {path: leaf for path, leaf in leaves(batch, name) if isinstance(leaf, Tensor)}
        self._versions = {
            name: (tensor, version_of(tensor))
            for name, tensor in named.items()
            if not tensor.is_inference()
        }

    def changed(self) -> str:
        """The name of a tensor that was changed; "" if none was."""
        for name, (tensor, version) in self._versions.items():
            if version_of(tensor) != version:
                return name
        return ""
