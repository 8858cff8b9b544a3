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
    """GPU memory of the steps so far in bytes, summed over their GPUs; 0 without any GPU.

    Attributes:
        activations: for each encoder, by name, the largest graph of a micro-batch.
        graphs: for each encoder, by name, the graphs of the last step's micro-batches.
        peak_before_second_pass: the allocator's peak when the last second pass began, after the
            first pass, the loss and the loss's backward pass.
    """

    activations: dict[str, int] = field(default_factory=dict)
    graphs: dict[str, list[int]] = field(default_factory=dict)
    peak_before_second_pass: int = 0

    def measured(self, encoder: str, graphs: Iterable[int]) -> None:
        """Note the memory of each micro-batch's graph."""
        self.graphs[encoder] = [*graphs]
        largest = max(self.graphs[encoder], default=0)
        self.activations[encoder] = max(largest, self.activations.get(encoder, 0))

    def second_pass_begins(self, devices: Iterable[torch.device]) -> None:
        """Note the peak so far."""
        self.peak_before_second_pass = sum(map(torch.cuda.max_memory_allocated, devices))

    def fits(
        self, gradients: Iterable[Tensor], modules: Iterable[nn.Module], *, graphs: bool
    ) -> bool:
        """Whether these gradients of features can stay on their GPU while the modules run again.

        Not before the first second pass, whose memory is unknown. `graphs`: whether graphs of
        micro-batches are in memory already.
        """
        sizes: dict[torch.device, int] = {}
        for gradient in gradients:
            sizes[gradient.device] = sizes.get(gradient.device, 0) + gradient.nbytes
        large = [device for device, n in sizes.items() if device.type == "cuda" and n >= SMALL]
        if not large or not self.activations:
            return not large
        parameters = {p for module in modules for p in module.parameters(recurse=False)}
        # For a shard (DTensor), nbytes is that of the whole parameter, which FSDP needs.
        missing = sum(p.nbytes for p in parameters if p.requires_grad and p.grad is None)
        need = (BACKWARD - graphs) * max(self.activations.values()) + missing
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
