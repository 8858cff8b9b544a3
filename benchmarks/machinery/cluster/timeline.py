"""Events and the resources that they occupy: the core of the simulation.

All ranks run the same program, so that an event (a computation, a collective, an exchange with the
neighbours) is one for all ranks, with a begin and an end for each of them. Three resources of a
rank serve one event at a time, in the program's order: the GPU's compute, its NVLink port, its
share of the node's NICs. An event therefore begins when its resources are free on all ranks that
take part, and everything that it needs is there. As the order on each resource is known, a queue
of events has nothing to decide: going through the program once, with arrays over all ranks, gives
the same times (a test compares a ring's with those of an event queue), and takes seconds for 4,096
ranks around a ring, 17 million exchanges, each rank with a speed of its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from machinery.cluster.hardware import Cluster, Spread

Times: TypeAlias = "NDArray[np.float64]"


@dataclass(frozen=True)
class Event:
    """A computation or a transfer: begin and end in seconds, by rank."""

    name: str
    resources: tuple[str, ...]
    begin: Times
    end: Times


@dataclass(frozen=True)
class Transfer(Event):
    """`slowdown`: fraction of its speed that a simultaneous computation loses."""

    slowdown: float


@dataclass(frozen=True)
class Side:
    """Groups of ranks, each of which has collectives of its own: one side of a grid of ranks.

    Ranks are numbered row by row in `shape`, and a group is the ranks along `axis` of it.
    `per_node`: ranks of a group that share a node.
    """

    shape: tuple[int, int]
    axis: int
    per_node: int

    @property
    def size(self) -> int:
        """Ranks of each group."""
        return self.shape[self.axis]

    def latest(self, times: Times) -> Times:
        """The maximum over each rank's group."""
        by_group = times.reshape(self.shape).max(axis=self.axis, keepdims=True)
        return np.broadcast_to(by_group, self.shape).reshape(-1)


class Speeds:
    """The ranks' speeds, which differ and drift; see `Spread`."""

    def __init__(self, spread: Spread, ranks: int, seed: int) -> None:
        self._spread = spread
        self._random = np.random.default_rng(seed)
        self._lasting = spread.lasting * self._random.standard_normal(ranks)
        self._drift = spread.drift * self._random.standard_normal(ranks)

    def seconds(self, seconds: float) -> Times:
        """Seconds of a computation on each rank, from those at the mean speed."""
        if seconds == 0:
            return np.zeros_like(self._drift)
        spread = self._spread
        kept, rest = spread.average(seconds)
        noise = spread.drift * self._random.standard_normal(len(self._drift))
        average = kept * self._drift + rest * noise
        left = math.exp(-seconds / spread.memory)
        self._drift = left * self._drift + math.sqrt(1 - left**2) * noise
        return np.asarray(seconds * np.maximum(0.5, 1 + self._lasting + average))


def collective_seconds(cluster: Cluster, side: Side, received: float, kind: str = "ring") -> float:
    """Seconds of a collective in which each rank receives so many bytes, without its latency."""
    # Rows of other nodes and sums for them enter and leave a node once, and the group's ranks in it
    # share them; what an all-to-all brings is each rank's own.
    shared = 1 if kind == "all-to-all" else side.per_node
    outside = received * (side.size - side.per_node) / max(1, side.size - 1)
    within = received / cluster.nvlink if side.per_node > 1 else 0.0
    return max(within, outside / (shared * cluster.nic_share))


class Timeline:
    """The program of all ranks, event by event; `now`: the times at which their compute is free."""

    def __init__(self, cluster: Cluster, speeds: Speeds, log: list[Event] | None = None) -> None:
        """`log`: receives every event."""
        self.cluster, self.speeds, self.log = cluster, speeds, log
        self.now, self._port, self._nic = (np.zeros(cluster.gpus) for _ in range(3))
        self._host = -cluster.gpu.ahead
        self._in_flight: list[Transfer] = []
        self.received = 0.0  #: bytes that a rank received

    def compute(self, name: str, seconds: float) -> None:
        """A computation that takes this long at the mean speed, during the transfers in flight."""
        begin = np.maximum(self.now, self._host)
        self._in_flight = [t for t in self._in_flight if (t.end > begin).any()]
        self.now = self._end(begin, self.speeds.seconds(seconds))
        self._record(Event(name, ("compute",), begin, self.now))

    def launch(self, seconds: float) -> None:
        """Let the host take so long before its next launch."""
        self._host += seconds

    def collective(self, name: str, side: Side, received: float, kind: str = "ring") -> Transfer:
        """A collective of each group of a side, in which each rank receives so many bytes.

        It begins when all ranks of a group have launched it. Data from other nodes comes in once,
        over the NICs of all of the group's ranks in the node. `kind`: "ring" as an all-gather or a
        reduce-scatter, "tree" as a small all-reduce, "all-to-all".
        """
        if side.size == 1:
            return self._nothing(name)
        outside = side.size > side.per_node
        seconds = collective_seconds(self.cluster, side, received, kind)
        seconds += self._latency(side, kind)
        ready = np.maximum(self.now, self._port)
        if outside:
            ready = np.maximum(ready, self._nic)
        begin = side.latest(ready)
        end = begin + seconds
        self.received += received
        self._port = end
        if outside:
            self._nic = end
        resources = ("port", "nic") if outside else ("port",)
        return self._fly(name, resources, begin, end, received / self.cluster.nvlink / seconds)

    def exchange(self, name: str, sent: float) -> Transfer:
        """Each rank sends so many bytes to the next one and receives as many from the one before.

        Between nodes it is a transfer of one rank over one NIC, which nothing else uses meanwhile.
        """
        cluster = self.cluster
        first = np.arange(cluster.gpus) % cluster.local == 0
        between = first & (cluster.nodes > 1)
        receiving = np.where(
            between,
            sent / cluster.nic + cluster.network_latency,
            sent / cluster.nvlink + cluster.nvlink_latency,
        )
        ready = np.maximum(self.now, self._port)
        begin = np.maximum(ready, np.roll(ready, 1))
        arrived = begin + cluster.base_latency + receiving
        self.received += sent
        end = np.maximum(arrived, np.roll(arrived, -1))  # its own was received as well
        self._port = end
        rate = sent / cluster.nvlink / float((end - begin).min())
        return self._fly(name, ("port",), begin, end, rate)

    def wait(self, transfer: Transfer | None) -> None:
        """Let each rank's later computations wait for this transfer."""
        if transfer is not None:
            self.now = np.maximum(self.now, transfer.end)

    def _latency(self, side: Side, kind: str) -> float:
        """Seconds of a collective without bytes."""
        cluster = self.cluster
        nodes = side.size // side.per_node
        if kind == "tree":
            steps = 2 * (nodes.bit_length() - 1)
            within = 2 * (side.per_node - 1)
        elif kind == "all-to-all":  # with the ranks of one node after another
            steps, within = nodes - 1, side.per_node - 1
        else:
            steps, within = nodes - 1, side.size - nodes
        latency = steps * cluster.network_latency + within * cluster.nvlink_latency
        return cluster.base_latency + latency

    def _fly(
        self, name: str, resources: tuple[str, ...], begin: Times, end: Times, rate: float
    ) -> Transfer:
        gpu = self.cluster.gpu
        slowdown = max(gpu.occupied, gpu.slowdown * min(1.0, rate))
        transfer = Transfer(name, resources, begin, end, slowdown)
        self._in_flight.append(transfer)
        self._record(transfer)
        return transfer

    def _nothing(self, name: str) -> Transfer:
        return Transfer(name, (), self.now, self.now, 0.0)

    def _end(self, begin: Times, work: Times) -> Times:
        """The ends of computations that take `work` seconds without the transfers in flight."""
        at, left = begin, work
        for transfer in self._in_flight:  # one after another, as they occupy the same port
            before = np.clip(transfer.begin - at, 0.0, left)
            at, left = at + before, left - before
            speed = 1 - transfer.slowdown
            during = np.clip((transfer.end - at) * speed, 0.0, left)
            at, left = at + during / speed, left - during
        return np.asarray(at + left)

    def _record(self, event: Event) -> None:
        if self.log is not None:
            self.log.append(event)


class WithoutTransfers(Timeline):
    """The same computation, in which nothing but small all-reduces is sent."""

    def collective(self, name: str, side: Side, received: float, kind: str = "ring") -> Transfer:
        """Nothing; an all-reduce remains, for which ranks wait for each other once a step."""
        if kind == "tree":
            return super().collective(name, side, received, kind)
        return self._nothing(name)

    def exchange(self, name: str, sent: float) -> Transfer:
        """Nothing."""
        return self._nothing(name)
