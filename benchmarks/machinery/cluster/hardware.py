"""GPUs, nodes and links. All rates per second, all sizes in bytes.

The defaults are those of H200s. `benchmarks/simulation.py` derives the fitted ones from the records
that docs/design/simulation.md names, which also says which of them are assumptions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megabatch.planning.seconds import PER_LOGIT, PER_OPERATION
from megabatch.planning.speeds import Speeds


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

    product_rate: float = Speeds.products
    per_operation: float = PER_OPERATION
    per_logit: float = PER_LOGIT
    chunk: float = 58e-6
    host: float = 1.6e-3
    ahead: float = 0.1
    slowdown: float = 0.53
    occupied: float = 0.12
    memory_rate: float = Speeds.memory
    spread: Spread = Spread()

    def sweep_seconds(self, operations: float, width: int) -> float:
        """Seconds for so many operations of a loss over features of this width, at mean speed."""
        return operations / self.product_rate * (self.per_operation + self.per_logit / width)


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
    nvlink: float = Speeds.nvlink
    nic: float = Speeds.network
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
