"""GPUs, nodes and links, of plans and of simulations. All rates per second, all sizes in bytes.

The defaults are those of H200s. `benchmarks/simulation.py` derives the fitted ones of the loss from
the records that docs/design/simulation.md names, which also says which of them are assumptions, and
`benchmarks/plan_check.py` those of the encoders. Other GPUs are scaled by their datasheets.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace

#: Floating-point operations per second that cuBLAS sustains, by part of the GPU's name: the mean
#: `product_tflops` of benchmarks/results/scaling.json.
PRODUCT_RATES = {"H200": 665e12}


@dataclass(frozen=True)
class Spread:
    """How ranks of one model of GPU differ in speed, as fractions of the mean.

    A GPU is faster or slower than the mean for good (`lasting`), and its speed drifts around that
    at its power limit (`drift`), forgetting its state within about `memory` seconds, so that long
    computations average over the drift. Both are drawn from normal distributions, for every rank.
    """

    lasting: float = 0.0063
    drift: float = 0.022
    memory: float = 0.029

    def average(self, seconds: float) -> tuple[float, float]:
        """The drift's mean over a computation of so many seconds, in units of `drift`.

        Returns:
            its part of the state at the computation's beginning, and the standard deviation of the
            rest, for an Ornstein-Uhlenbeck process.
        """
        fast = self.memory / seconds
        kept = fast * -math.expm1(-1 / fast)
        return kept, math.sqrt(max(0.0, 2 * fast * (1 - kept) - kept**2))

    def deviation(self, seconds: float) -> float:
        """Standard deviation of the drift's mean over so many seconds."""
        return self.drift * math.hypot(*self.average(seconds))


@dataclass(frozen=True)
class Gpu:
    """One GPU.

    Attributes:
        product_rate: of large matrix products, operations per second.
        per_operation, per_logit: a sweep of a loss takes `per_operation + per_logit / d` of the
            time of its operations at `product_rate`: the products and the tile kernels' loops, and
            the exponentials and reductions of a tile, which do not depend on the width d.
        chunk: seconds that a sweep over a chunk takes in addition: launches, and the tails of its
            kernels, in which multiprocessors idle.
        host: seconds of the host per chunk, for which the GPU waits where chunks are shorter.
        ahead: seconds by which the host is ahead of the GPU when a loss begins, as in a training
            step, where the encoders' kernels are queued.
        slowdown: fraction of its speed that a computation loses during a transfer at the full rate
            of NVLink; in proportion below, but at least `occupied`, the share of multiprocessors
            that NCCL's kernels occupy.
        memory_rate: of the GPU's memory, bytes per second.
        spread: the differences between ranks.
    """

    product_rate: float = PRODUCT_RATES["H200"]
    per_operation: float = 1.018
    per_logit: float = 85.0
    chunk: float = 58e-6
    host: float = 1.6e-3
    ahead: float = 0.1
    slowdown: float = 0.53
    occupied: float = 0.12
    memory_rate: float = 3.6e12
    spread: Spread = Spread()

    def sweep_seconds(self, operations: float, width: int) -> float:
        """Seconds for so many operations of a loss over features of this width, at mean speed."""
        return operations / self.product_rate * (self.per_operation + self.per_logit / width)


@dataclass(frozen=True)
class Encoding:
    """How encoders use a GPU.

    Attributes:
        products: share of `Gpu.product_rate` that their matrix products and attention reach.
        convolutions: share of it that convolutions reach, by patches of images (patches.json).
        kernel: seconds of each kernel in addition: its launch, and its tail, in which
            multiprocessors idle.
        separate: share of `Gpu.memory_rate` that kernels reach which torch.compile does not fuse.
        host_link: bytes per second that the GPU receives from its host.
    """

    products: float = 0.97
    convolutions: float = 0.05
    kernel: float = 5e-6
    separate: float = 0.82
    host_link: float = 50e9


@dataclass(frozen=True)
class Datasheet:
    """A model of GPU as its vendor describes it.

    Attributes:
        tflops: of dense bfloat16 products.
        memory_rate: bytes per second. memory: bytes, those that CUDA reports.
        nvlink: bytes per second to other GPUs of a node, in one direction; of GPUs without NVLink
            those of PCIe.
        host_link: bytes per second of PCIe, in one direction.
        source: the datasheet.
    """

    tflops: float
    memory_rate: float
    memory: int
    nvlink: float
    host_link: float
    source: str


#: By word of the GPU's name.
DATASHEETS = {
    "H200": Datasheet(
        *(989.5, 4.8e12, 143_771 << 20, 450e9, 64e9),
        "NVIDIA H200 Tensor Core GPU datasheet, SXM",
    ),
    "H100": Datasheet(
        *(989.5, 3.35e12, 81_559 << 20, 450e9, 64e9),
        "NVIDIA H100 Tensor Core GPU datasheet, SXM",
    ),
    "A100": Datasheet(
        *(312.0, 2.039e12, 81_920 << 20, 300e9, 32e9),
        "NVIDIA A100 Tensor Core GPU datasheet, 80GB SXM",
    ),
    "A800": Datasheet(
        *(312.0, 2.039e12, 81_920 << 20, 200e9, 32e9),
        "NVIDIA A800 Tensor Core GPU datasheet, 80GB SXM",
    ),
    "L40S": Datasheet(
        *(362.05, 864e9, 46_068 << 20, 32e9, 32e9),
        "NVIDIA L40S datasheet",
    ),
}
#: The kind of GPU whose figures were measured.
MEASURED = "H200"


def datasheet(name: str) -> Datasheet | None:
    """The datasheet of a GPU, by a name such as "NVIDIA H200"; None if there is none."""
    words = set(re.split(r"[\s-]+", name))  # whole ones: a GH200 is no H200
    if words & {"PCIe", "PCIE", "NVL"}:  # slower than the SXM modules of the same name
        return None
    return next((sheet for part, sheet in DATASHEETS.items() if part in words), None)


def gpu_named(name: str) -> Gpu | None:
    """A GPU by its name: as measured, or with an H200's shares of what its datasheet promises."""
    sheet, own = datasheet(name), DATASHEETS[MEASURED]
    if sheet is None:
        return None
    base = Gpu()
    return replace(
        base,
        product_rate=base.product_rate * sheet.tflops / own.tflops,
        memory_rate=base.memory_rate * sheet.memory_rate / own.memory_rate,
    )


def encoding_named(name: str) -> Encoding:
    """How encoders use a GPU of this name: an H200's shares."""
    sheet, own = datasheet(name) or DATASHEETS[MEASURED], DATASHEETS[MEASURED]
    base = Encoding()
    return replace(base, host_link=base.host_link * sheet.host_link / own.host_link)


@dataclass(frozen=True)
class Cluster:
    """Identical nodes of identical GPUs.

    Attributes:
        gpus: in all nodes together.
        per_node: GPUs of a node.
        gpu: one of them.
        nvlink: bytes per second that a GPU receives from others of its node in a collective, and
            sends at the same time.
        nic: bytes per second of one NIC, each way.
        nics: NICs of a node, which its GPUs share equally in a collective.
        base_latency: seconds of a collective of no bytes, with the events between streams.
        nvlink_latency, network_latency: seconds of each of its steps within a node and between
            nodes: NCCL's own estimates for a ring (protocol "Simple").

    Raises:
        ValueError: the GPUs are not whole nodes.
    """

    gpus: int
    per_node: int = 8
    gpu: Gpu = Gpu()
    nvlink: float = 324e9
    nic: float = 44e9
    nics: int = 8
    base_latency: float = 22e-6
    nvlink_latency: float = 3.4e-6
    network_latency: float = 14e-6

    def __post_init__(self) -> None:
        if self.gpus > self.per_node and self.gpus % self.per_node:
            raise ValueError(
                f"gpus: expected whole nodes of {self.per_node} (gpus_per_node), got {self.gpus}"
            )

    @property
    def local(self) -> int:
        """GPUs of a node that take part."""
        return min(self.gpus, self.per_node)

    @property
    def nodes(self) -> int:
        """Nodes that take part."""
        return self.gpus // self.local

    @property
    def nic_share(self) -> float:
        """Bytes per second of the network for each GPU of a node while all of them transfer."""
        return self.nics * self.nic / self.per_node


def usual_cluster(name: str, gpus: int) -> Cluster | None:
    """So many GPUs of a name, in nodes of 8 if they are more.

    None: there is no datasheet of them, or they are no whole nodes.
    """
    gpu, sheet = gpu_named(name), datasheet(name)
    if gpu is None or sheet is None or (gpus > Cluster.per_node and gpus % Cluster.per_node):
        return None
    return Cluster(gpus, gpu=gpu, nvlink=nvlink_of(sheet))


def nvlink_of(sheet: Datasheet) -> float:
    """Bytes per second that a GPU receives in a collective, with an H200's share of its link."""
    return Cluster.nvlink * sheet.nvlink / DATASHEETS[MEASURED].nvlink
