"""The memory that steps take, and whether gradients of features wait on the host because of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

#: Bytes that always stay on the GPU.
SMALL = 64 << 20
#: Memory of a micro-batch's graph and its backward pass, relative to the graph alone, at most.
BACKWARD = 2.0


@dataclass
class StepMemory:
    """GPU memory of the last step in bytes, summed over its GPUs; 0 without any GPU.

    Attributes:
        graphs: for each encoder, by name, the graph of each micro-batch.
        peak_before_second_pass: the allocator's peak when the second pass began, after the first
            pass, the loss and the loss's backward pass.
    """

    graphs: dict[str, list[int]] = field(default_factory=dict)
    peak_before_second_pass: int = 0

    def fits(
        self, gradients: Iterable[Tensor], modules: Iterable[nn.Module], *, graphs: bool
    ) -> bool:
        """Whether these gradients of features can stay on their GPU while the modules run again.

        Not before the first second pass, whose memory is unknown. `graphs`: whether graphs of
        micro-batches are in memory already.
        """
        held: dict[torch.device, int] = {}
        for gradient in gradients:
            held[gradient.device] = held.get(gradient.device, 0) + gradient.nbytes
        large = [device for device, n in held.items() if device.type == "cuda" and n >= SMALL]
        largest = max((size for sizes in self.graphs.values() for size in sizes), default=0)
        if not large or not self.graphs:
            return not large
        parameters = {p for module in modules for p in module.parameters(recurse=False)}
        # For a shard (DTensor), nbytes is that of the whole parameter, which FSDP needs.
        missing = sum(p.nbytes for p in parameters if p.requires_grad and p.grad is None)
        need = (BACKWARD - graphs) * largest + missing
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
