"""What the schedules transfer, compute and hold."""

import pytest

from machinery.cluster.hardware import Cluster, Gpu, Spread
from machinery.cluster.schedules import UNIT, Grid, Ring, Workload
from machinery.cluster.step import loss_memory
from machinery.cluster.timeline import Speeds, Timeline
from megabatch.similarity.distributed import schedule as library

EVEN = Gpu(spread=Spread(0.0, 0.0))


def run(schedule, work, cluster):
    log = []
    line = Timeline(cluster, Speeds(cluster.gpu.spread, cluster.gpus, 0), log)
    schedule.run(work, line)
    return line, log


def small(work, ranks):
    """Bytes of states (forward) and of two numbers a row (backward) of other ranks' rows."""
    return 2 * 8 * work.rows * (ranks - 1)


@pytest.mark.parametrize("shape", [(16, 1), (8, 2), (4, 4), (2, 8)])
def test_a_rank_of_a_grid_receives_what_the_formula_says(shape):
    work, cluster = Workload(1024, 64), Cluster(16)
    line, _ = run(Grid(shape, gather=1 << 16), work, cluster)  # in rounds
    features = 8 * work.width * work.rows * sum(side - 1 for side in shape)
    others = sum(small(work, side) for side in shape)
    assert line.received == features + others + 4  # and the scale's gradient
    # Features of a single round are saved: no gathering again.
    line, _ = run(Grid(shape), work, cluster)
    assert line.received == 6 / 8 * features + others + 4


def test_a_rank_of_a_ring_receives_as_much_as_by_gathering():
    work = Workload(1024, 64)
    line, _ = run(Ring(), work, Cluster(16))
    partials = (4 * work.width + 8) * work.rows  # a rank's own come home as well
    formula = 8 * work.width * work.rows * 15
    assert line.received == formula + 8 * work.rows * 2 * 15 + partials + 4


@pytest.mark.parametrize("schedule", [Grid((8, 1)), Grid((8, 1), 1 << 22), Grid((2, 4)), Ring()])
@pytest.mark.parametrize("sweeps", [(2, 6), (6,)])
def test_all_blocks_are_computed(schedule, sweeps):
    work, cluster = Workload(32_768, 256, sweeps), Cluster(8, gpu=EVEN)
    still = Cluster(8, gpu=Gpu(spread=Spread(0, 0), chunk=0.0, slowdown=0.0, occupied=0.0))
    _, log = run(schedule, work, still)
    computed = sum(float(e.end[0] - e.begin[0]) for e in log if e.resources == ("compute",))
    operations = sum(sweeps) * work.rows**2 * 8 * work.width
    expected = cluster.gpu.sweep_seconds(operations, work.width)
    # Adding to what arrives comes on top in a ring; x's rounding is part of the sweeps.
    assert computed == pytest.approx(expected, rel=0.01)


def test_rounds_are_the_librarys():
    for rows, ranks in ((65_536, 4), (131_072, 4), (16_384, 64), (1 << 20, 8)):
        work = Workload(rows, 768)
        expected = library.round_rows(rows, ranks * work.row_bytes)
        assert Grid((ranks, 1)).round_rows(work) == expected
    assert Ring().chunk_rows(Workload(1 << 20, 768)) == 2 * UNIT
    assert Ring().chunk_rows(Workload(4096, 768)) == 4096


def test_transfers_hide_beside_other_rounds_but_not_without_overlap():
    work, cluster = Workload(65_536, 768), Cluster(8, gpu=EVEN)
    gather = Grid.gather // 4
    on, log = run(Grid((8, 1), gather), work, cluster)
    off, _ = run(Grid((8, 1), gather, overlap=False), work, cluster)
    assert on.now.max() < off.now.max()
    backward = [e for e in log if e.name == "backward"]
    sums = [e for e in log if e.name == "reduce-scatter"]
    assert len(backward) == len(sums) > 4
    # The sums of a round travel while the next one is computed.
    assert sums[0].begin[0] < backward[1].end[0]
    assert sums[0].end[0] > backward[1].begin[0]


def test_the_host_limits_rings_of_many_small_chunks():
    work, cluster = Workload(128, 768), Cluster(512)
    line, _ = run(Ring(), work, cluster)
    gpu = cluster.gpu
    assert line.now.max() == pytest.approx(2 * 512 * gpu.host - gpu.ahead, rel=0.02)


def test_memory_grows_with_the_gathered_rows_of_a_grid():
    work, cluster = Workload(8192, 768), Cluster(1024)
    sizes = [loss_memory(cluster, work, Grid((1024 // c, c))) for c in (8, 16, 32, 64, 128)]
    assert sizes == sorted(sizes)
    assert sizes[-1] > 128 * 8192 * 768 * 6
