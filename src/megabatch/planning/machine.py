"""The devices of a plan."""

from __future__ import annotations

import os
from dataclasses import dataclass

import psutil
import torch

#: Share of a GPU's memory that the allocator loses to fragmentation.
FRAGMENTATION = 0.05
#: GPUs of a host of another machine.
GPUS = 8
#: Bytes for CUDA's context, cuBLAS's workspaces and NCCL's buffers, if they cannot be measured.
CONTEXT = 1 << 30


@dataclass(frozen=True)
class Machine:
    """The identical devices of a run.

    Attributes:
        device: "cpu" or "cuda".
        count: number of processes, each with one device.
        limit: bytes available to tensors on each device, or to each process on the CPU.
        host: free bytes per host; None if unknown, on another machine.
        per_host: processes of a host, if there are as many.
        name: of the GPU, if known.
    """

    device: str
    count: int
    limit: int
    host: int | None = None
    per_host: int = GPUS
    name: str = ""

    @property
    def hosts(self) -> int:
        """Number of hosts."""
        return -(-self.count // self.per_host)


def this_machine(device: torch.device, count: int) -> Machine:
    """The machine of this process, with `count` processes in total."""
    per_host = int(os.environ.get("LOCAL_WORLD_SIZE", count))
    host = int(psutil.virtual_memory().available)
    if device.type != "cuda":
        return Machine("cpu", count, host // per_host, None, per_host)
    free, _ = torch.cuda.mem_get_info(device)
    limit = int(free * (1 - FRAGMENTATION))
    name = torch.cuda.get_device_name(device)
    return Machine("cuda", count, limit, host, per_host, name)


def other_machine(count: int, memory: int, name: str = "", per_host: int = GPUS) -> Machine:
    """A machine with `count` GPUs of `memory` bytes each."""
    limit = int((memory - CONTEXT) * (1 - FRAGMENTATION))
    return Machine("cuda", count, max(0, limit), None, per_host, name)
