"""Whether the gradients of features wait on the GPU or on the host for their second pass."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

#: Bytes. Less than this is not worth a look.
SMALL = 64 << 20
#: A micro-batch's backward pass also takes memory for what it has in hand; as much again as the
#: graph holds is more than has been seen.
BACKWARD = 2.0


class Room:
    """Remembers what a second pass took, and so knows whether the next one leaves room.

    The gradients of features, O(b d), are needed a micro-batch at a time only. On the host they
    make room for activations, at the price of two copies. Where they fit beside the activations
    they stay; before the first second pass nothing is known, and they go.
    """

    def __init__(self) -> None:
        self.activations: int | None = None

    def measured(self, activations: int) -> None:
        """Note how much the graph of one micro-batch took, in bytes."""
        self.activations = max(activations, self.activations or 0)

    def suffices(self, gradients: Iterable[Tensor], modules: Iterable[nn.Module]) -> bool:
        """Whether these gradients can stay on their GPU while the modules run again."""
        sizes: dict[torch.device, int] = {}
        for gradient in gradients:
            sizes[gradient.device] = sizes.get(gradient.device, 0) + gradient.nbytes
        large = {device: n for device, n in sizes.items() if device.type == "cuda" and n >= SMALL}
        if not large:
            return True
        if self.activations is None:
            return False
        need = BACKWARD * self.activations + _gradients_to_come(modules)
        return all(free(device) >= need for device in large)


def allocated(devices: Iterable[torch.device]) -> int:
    """Bytes that tensors take on these GPUs now; 0 without any."""
    return sum(torch.cuda.memory_allocated(device) for device in devices)


def free(device: torch.device) -> int:
    """Bytes that tensors can still take on a GPU."""
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + unused


def to_host(tensor: Tensor) -> Tensor:
    """A GPU's tensor on the host, in pinned memory; to be read in the order of the GPU's stream."""
    if not tensor.is_cuda:
        return tensor.cpu()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def _gradients_to_come(modules: Iterable[nn.Module]) -> int:
    parameters = {p for module in modules for p in module.parameters(recurse=False)}
    # Of a shard (DTensor) this is the whole parameter: FSDP has it whole on the way.
    return sum(p.nbytes for p in parameters if p.requires_grad and p.grad is None)
