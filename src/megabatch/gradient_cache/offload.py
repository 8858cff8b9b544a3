"""Whether the gradients of features wait on the GPU or on the host for the second pass."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

#: Bytes that always stay on the GPU.
SMALL = 64 << 20
#: Memory of a micro-batch's graph and its backward pass, relative to the graph alone; temporaries
#: took less than this in all measurements.
BACKWARD = 2.0


class OffloadPolicy:
    """Decides from the memory that earlier second passes took.

    The gradients of features, O(b d), are needed one micro-batch at a time. On the host they leave
    more memory for activations, at the price of two copies. They stay on the GPU if they fit beside
    the activations; before the first second pass that is unknown, and they go to the host.
    """

    def __init__(self) -> None:
        self.activations: int | None = None

    def measured(self, activations: int) -> None:
        """Note the memory of a micro-batch's graph, in bytes."""
        self.activations = max(activations, self.activations or 0)

    def fits(self, gradients: Iterable[Tensor], modules: Iterable[nn.Module]) -> bool:
        """Whether these gradients can stay on their GPU while the modules run again."""
        sizes: dict[torch.device, int] = {}
        for gradient in gradients:
            sizes[gradient.device] = sizes.get(gradient.device, 0) + gradient.nbytes
        large = {device: n for device, n in sizes.items() if device.type == "cuda" and n >= SMALL}
        if not large:
            return True
        if self.activations is None:
            return False
        need = BACKWARD * self.activations + _missing_gradients(modules)
        return all(free(device) >= need for device in large)


def allocated(devices: Iterable[torch.device]) -> int:
    """Bytes that tensors take on these GPUs; 0 without any GPU."""
    return sum(torch.cuda.memory_allocated(device) for device in devices)


def free(device: torch.device) -> int:
    """Bytes that are still available for tensors on a GPU."""
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + unused


def to_host(tensor: Tensor) -> Tensor:
    """Copy a GPU's tensor to pinned host memory; only work in the GPU's stream may read it."""
    if not tensor.is_cuda:
        return tensor.cpu()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def _missing_gradients(modules: Iterable[nn.Module]) -> int:
    parameters = {p for module in modules for p in module.parameters(recurse=False)}
    # For a shard (DTensor), nbytes is that of the whole parameter, which FSDP needs temporarily.
    return sum(p.nbytes for p in parameters if p.requires_grad and p.grad is None)
