"""The schedules of a loss, as programs on a timeline.

`Grid` models `similarity/distributed/schedule.py` on R x C ranks: a rank gathers the rows of the C
ranks of its row, then, in rounds, the columns of the R ranks of its column, and computes that
block. Gathering without a grid is n x 1. `Ring` models a ring, as Inf-CL's, which the library does
not have.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from machinery.cluster.hardware import Cluster
from machinery.cluster.timeline import Side, Timeline, Transfer
from megabatch.similarity import settings
from megabatch.similarity.distributed import schedule as library

#: Rows and columns of a block of the engine on a GPU, for the default workspace.
BLOCK = 16_384
#: Bytes of features in a chunk of a ring, and a multiple of rows of larger ones.
CHUNK, UNIT = 48 << 20, BLOCK


@dataclass(frozen=True)
class Workload:
    """A loss over equal shards.

    Attributes:
        rows: of each GPU.
        width: of the features.
        sweeps: operations of each sweep over the matrix, in units of (pairs x width): a softmax
            loss's forward and backward pass; a sigmoid loss's only one, with its gradients.
        item: bytes of a number of the features.
        loss: the option's name of the loss, whose memory is counted.
    """

    rows: int
    width: int
    sweeps: tuple[int, ...] = (2, 6)
    item: int = 2
    loss: str = "clip"

    @property
    def row_bytes(self) -> int:
        """Bytes of a row's features."""
        return self.width * self.item

    @property
    def gradient_bytes(self) -> int:
        """Bytes of a row's gradient while it is summed, in float32."""
        return 4 * self.width


class Schedule(Protocol):
    """Who has which rows and columns, and when."""

    @property
    def name(self) -> str:
        """The name for users."""
        ...

    def run(self, work: Workload, timeline: Timeline) -> None:
        """Put the loss's forward and backward pass on the timeline."""
        ...

    @property
    def columns(self) -> int:
        """Columns of a grid; 0: it is not a grid."""
        ...

    @property
    def limit(self) -> int:
        """Bytes for `megabatch.similarity.set_gather`."""
        ...


@dataclass(frozen=True)
class Grid:
    """Ranks in R rows and C columns, all of a node's in one row; R x 1: no grid, all is gathered.

    Attributes:
        shape: (R, C).
        gather: bytes of gathered columns of a rank's whole side up to which they are one round;
            more are gathered in rounds of a quarter. See `megabatch.similarity.set_gather`.
        overlap: transfers overlap computations; see `megabatch.similarity.set_overlap`.
    """

    shape: tuple[int, int]
    gather: int = settings.DEFAULT_GATHER
    overlap: bool = True

    @property
    def name(self) -> str:
        """For users."""
        rows, cols = self.shape
        return "gather" if cols == 1 else f"grid {rows} x {cols}"

    @property
    def columns(self) -> int:
        """See `Schedule`."""
        return 0 if self.shape[1] == 1 else self.shape[1]

    @property
    def limit(self) -> int:
        """See `Schedule`."""
        return self.gather

    def sides(self, cluster: Cluster) -> tuple[Side, Side]:
        """The groups that share rows, and the groups that share columns."""
        local = min(self.shape[1], cluster.local)
        return Side(self.shape, 1, local), Side(self.shape, 0, cluster.local // local)

    def round_rows(self, work: Workload) -> int:
        """Rows of each rank's columns in a round."""
        before = settings.set_gather(self.gather)
        try:
            return library.round_rows(work.rows, self.shape[0] * work.row_bytes)
        finally:
            settings.set_gather(before)

    def run(self, work: Workload, timeline: Timeline) -> None:
        """See `Schedule`."""
        backward = len(work.sweeps) - 1
        for k, operations in enumerate(work.sweeps):
            _GridSweep(self, work, timeline, operations, k, last=k == backward).run()
        reduce_scale(timeline)


class _GridSweep:
    """One sweep of a `Grid` over a rank's block."""

    def __init__(
        self,
        grid: Grid,
        work: Workload,
        timeline: Timeline,
        operations: int,
        number: int,
        last: bool,
    ) -> None:
        self.grid, self.work, self.timeline, self.operations = grid, work, timeline, operations
        self.row_side, self.col_side = grid.sides(timeline.cluster)
        self.gradients, self.first = last, number == 0
        self.step = grid.round_rows(work)

    def run(self) -> None:
        """All rounds of columns, then the exchange of results."""
        work, timeline = self.work, self.timeline
        one_round = self.step == work.rows
        # Features that one round gathered were saved.
        arriving_rows = self._gather(self.row_side, work.rows, self.first or not one_round)
        arriving = self._gather(self.col_side, self.step, self.first or not one_round)
        returning: Transfer | None = None
        timeline.wait(arriving_rows)
        for start in range(0, work.rows, self.step):
            rows = min(self.step, work.rows - start)
            following = min(self.step, work.rows - start - rows)
            here, arriving = arriving, None
            if self.grid.overlap and following:
                arriving = self._gather(self.col_side, following, True)
            self._compute(rows, here, own_first=start == 0, last=not following)
            timeline.wait(returning)
            returning = self._return(rows)
            if not self.grid.overlap:
                timeline.wait(returning)
                if following:
                    arriving = self._gather(self.col_side, following, True)
        if self.gradients:
            if not self.grid.overlap:
                timeline.wait(returning)
            timeline.compute("x's last product", self._tail())
        if self.row_side.size > 1:
            timeline.wait(self._results(self.row_side, work.rows))
        timeline.wait(returning)

    def _compute(self, rows: int, arriving: Transfer | None, own_first: bool, last: bool) -> None:
        """The block of these columns of each rank; own ones first, if others' are to arrive."""
        work, timeline, gpu = self.work, self.timeline, self.timeline.cluster.gpu
        height, ranks = self.grid.shape[1] * work.rows, self.grid.shape[0]
        features = self.first or self.step < work.rows
        name = "backward" if self.gradients else "forward"
        if not self.grid.overlap:
            timeline.wait(arriving)
        tail = self._tail() if last and self.gradients else 0.0
        chunks = [ranks]
        if features and own_first and ranks > 1 and rows >= library.LARGE:
            chunks = [1, ranks - 1]
        for k, some in enumerate(chunks):
            if k + 1 == len(chunks):
                timeline.wait(arriving)
            seconds = gpu.sweep_seconds(
                self.operations * height * some * rows * work.width, work.width
            )
            less = tail if k + 1 == len(chunks) else 0.0
            timeline.compute(name, max(0.0, seconds + gpu.chunk - less))
        timeline.launch(gpu.host)

    def _tail(self) -> float:
        """x's last product and the rounding of its gradient: during the last transfer."""
        work, gpu = self.work, self.timeline.cluster.gpu
        height, cols = self.grid.shape[1] * work.rows, self.grid.shape[0] * self.step
        product = 2 * min(height, BLOCK) * min(cols, BLOCK) * work.width / gpu.product_rate
        written = height * (work.gradient_bytes + 2 * work.row_bytes)
        return product + written / gpu.memory_rate

    def _gather(self, side: Side, rows: int, features: bool) -> Transfer | None:
        """Rows of the side's ranks: features, and in the backward pass two numbers of each."""
        numbers = 8 if self.gradients and not self.first else 0
        row = (self.work.row_bytes if features else 0) + numbers
        if side.size == 1 or row == 0:
            return None
        return self.timeline.collective("gather", side, (side.size - 1) * rows * row)

    def _return(self, rows: int) -> Transfer | None:
        """Results of these columns to their ranks: states in the forward pass, else gradients."""
        if self.col_side.size == 1:
            return None
        transfer = self._results(self.col_side, rows)
        if self.gradients:
            return transfer
        self.timeline.wait(transfer)
        return None

    def _results(self, side: Side, rows: int) -> Transfer:
        others = (side.size - 1) * rows
        if self.gradients:
            sums = others * self.work.gradient_bytes
            return self.timeline.collective("reduce-scatter", side, sums)
        return self.timeline.collective("all-to-all", side, 8 * others, "all-to-all")


@dataclass(frozen=True)
class Ring:
    """Chunks pass from rank to rank in single transfers; their gradients follow one step behind.

    Attributes:
        chunk: bytes of a chunk.
        overlap: as in `Grid`.
    """

    chunk: int = CHUNK
    overlap: bool = True

    @property
    def name(self) -> str:
        """For users."""
        return "ring"

    @property
    def columns(self) -> int:
        """See `Schedule`."""
        return 0

    @property
    def limit(self) -> int:
        """So that rounds of the library are as large as a chunk; the memory is a rough guess."""
        return library.ROUND * self.chunk

    def chunk_rows(self, work: Workload) -> int:
        """Rows of a chunk."""
        rows = max(1, self.chunk // work.row_bytes)
        return min(work.rows, rows if rows < UNIT else rows // UNIT * UNIT)

    def run(self, work: Workload, timeline: Timeline) -> None:
        """See `Schedule`."""
        chunk = self.chunk_rows(work)
        for k, operations in enumerate(work.sweeps):
            gradients = k == len(work.sweeps) - 1
            returning: Transfer | None = None
            for start in range(0, work.rows, chunk):
                rows = min(chunk, work.rows - start)
                features = rows * (work.row_bytes + (8 if gradients and k else 0))
                partial = rows * (work.gradient_bytes if gradients else 8)
                seconds = timeline.cluster.gpu.sweep_seconds(
                    operations * work.rows * rows * work.width, work.width
                )
                returning = self._round(timeline, seconds, features, partial, returning)
            timeline.wait(returning)
        reduce_scale(timeline)

    def _round(
        self,
        timeline: Timeline,
        seconds: float,
        features: int,
        partial: int,
        returning: Transfer | None,
    ) -> Transfer | None:
        """One chunk of every rank around the ring; returns the transfer of sums to their owners.

        seconds: of a step's computation. features, partial: bytes of a chunk and of its results.
        """
        gpu, ranks = timeline.cluster.gpu, timeline.cluster.gpus
        for step in range(ranks):
            sent = (features if step + 1 < ranks else 0) + (partial if step else 0)
            transfer = timeline.exchange("ring step", sent) if sent else None
            if not self.overlap:
                timeline.wait(transfer)
            # Results that arrive are added to a rank's own: two are read, one is written.
            adding = 3 * partial / gpu.memory_rate if step else 0.0
            timeline.compute("chunk", seconds + gpu.chunk + adding)
            timeline.launch(gpu.host)
            timeline.wait(transfer)
            if step == 0:
                timeline.wait(returning)
        if ranks == 1:
            return None
        returning = timeline.exchange("to the owner", partial)
        if not self.overlap:
            timeline.wait(returning)
        return returning


def default(cluster: Cluster, work: Workload) -> Schedule:
    """The schedule that the library takes by itself, for shards of one size."""
    most = library.most_sharing(work.rows, work.row_bytes)
    cols = library.columns_for(cluster.nodes, cluster.local, most)
    shape = (cluster.gpus // cols, cols) if cols else (cluster.gpus, 1)
    return Grid(shape, settings.current().gather)


def reduce_scale(timeline: Timeline) -> None:
    """The scale's gradient, which all ranks average at the end of a step."""
    everyone = Side((1, timeline.cluster.gpus), 1, timeline.cluster.local)
    timeline.wait(timeline.collective("scale's gradient", everyone, 4.0, "tree"))
