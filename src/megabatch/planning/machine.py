"""The devices of a plan: their memory and their speeds, measured or by datasheets."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import psutil

if TYPE_CHECKING:
    import torch

#: Share of a GPU's memory that the allocator loses to fragmentation.
FRAGMENTATION = 0.05
#: GPUs of a host of another machine.
GPUS = 8
#: Bytes for CUDA's context, cuBLAS's workspaces and NCCL's buffers, if they cannot be measured.
CONTEXT = 1 << 30


class Datasheet(NamedTuple):
    """A model of GPU as its vendor describes it.

    Operations per second of dense bfloat16 products; bytes per second of its memory, and of NVLink
    or, without it, of PCIe to other GPUs in one direction; bytes that CUDA reports.
    """

    products: float
    memory: float
    nvlink: float
    capacity: int


#: NVIDIA's datasheets of SXM modules (of A100 and A800 those with 80 GB), by word of a GPU's name.
DATASHEETS = {
    "H200": Datasheet(989.5e12, 4.8e12, 450e9, 143_771 << 20),
    "H100": Datasheet(989.5e12, 3.35e12, 450e9, 81_559 << 20),
    "A100": Datasheet(312e12, 2.039e12, 300e9, 81_920 << 20),
    "A800": Datasheet(312e12, 2.039e12, 200e9, 81_920 << 20),
    "L40S": Datasheet(362.05e12, 864e9, 32e9, 46_068 << 20),
}


class Speeds(NamedTuple):
    """What a GPU reaches per second; by default an H200, measured by benchmarks/scaling.py.

    Operations of large matrix products; bytes of its memory; bytes that it receives from GPUs of
    its host in a collective.
    """

    products: float = 665e12
    memory: float = 3.6e12
    nvlink: float = 324e9


def datasheet(name: str) -> Datasheet | None:
    """The datasheet of a GPU, by a name such as "NVIDIA H200"; None if there is none."""
    words = set(re.split(r"[\s-]+", name))  # whole ones: a GH200 is no H200
    if words & {"PCIe", "PCIE", "NVL"}:  # slower than the SXM modules of the same name
        return None
    return next((sheet for part, sheet in DATASHEETS.items() if part in words), None)


def speeds_of(name: str) -> Speeds | None:
    """The speeds of a GPU by its name: an H200's shares of what its datasheet promises."""
    if (sheet := datasheet(name)) is None:
        return None
    rates = zip(Speeds(), sheet[:3], DATASHEETS["H200"][:3], strict=True)
    return Speeds(*(reached * rate / promised for reached, rate, promised in rates))


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
        speeds: of the GPU, if known.
    """

    device: str
    count: int
    limit: int
    host: int | None = None
    per_host: int = GPUS
    name: str = ""
    speeds: Speeds | None = None


def this_machine(device: torch.device, count: int) -> Machine:
    """The machine of this process, with `count` processes in total."""
    import torch  # `megabatch plan --help` needs the names of GPUs alone

    per_host = int(os.environ.get("LOCAL_WORLD_SIZE", count))
    host = int(psutil.virtual_memory().available)
    if device.type != "cuda":
        return Machine("cpu", count, host // per_host, None, per_host)
    free, _ = torch.cuda.mem_get_info(device)
    limit = int(free * (1 - FRAGMENTATION))
    name = torch.cuda.get_device_name(device)
    return Machine("cuda", count, limit, host, per_host, name, speeds_of(name))


def other_machine(count: int, memory: int, name: str = "") -> Machine:
    """A machine with `count` GPUs of `memory` bytes each."""
    limit = int((memory - CONTEXT) * (1 - FRAGMENTATION))
    return Machine("cuda", count, max(0, limit), name=name, speeds=speeds_of(name))
