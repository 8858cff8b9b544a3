"""Events and the resources that they occupy."""

import heapq
import itertools
from dataclasses import replace

import numpy as np
import pytest

from machinery.cluster.hardware import Cluster, Gpu, Spread
from machinery.cluster.schedules import Grid, Ring, Workload
from machinery.cluster.timeline import Side, Speeds, Timeline, WithoutTransfers

EVEN = Gpu(spread=Spread(0.0, 0.0))


def timeline(cluster, log=None, seed=0):
    return Timeline(cluster, Speeds(cluster.gpu.spread, cluster.gpus, seed), log)


def everyone(cluster):
    return Side((1, cluster.gpus), 1, cluster.local)


def test_a_collective_begins_with_the_last_rank_and_takes_bytes_over_bandwidth():
    cluster = replace(Cluster(4, gpu=EVEN), base_latency=1.0, nvlink_latency=0.1, nvlink=100.0)
    line = timeline(cluster)
    line.now = np.array([0.0, 5.0, 1.0, 2.0])
    transfer = line.collective("gather", everyone(cluster), 300.0)
    assert transfer.begin.tolist() == [5.0] * 4
    assert transfer.end == pytest.approx([5 + 1 + 3 * 0.1 + 3] * 4)
    assert line.now.tolist() == [0.0, 5.0, 1.0, 2.0]  # nobody has waited for it
    line.wait(transfer)
    assert line.now == pytest.approx(transfer.end)
    assert line.received == 300


def test_a_node_receives_once_what_its_gpus_share_but_an_all_to_all_brings_each_its_own():
    no_latency = {"base_latency": 0.0, "nvlink_latency": 0.0, "network_latency": 0.0}
    cluster = replace(Cluster(16, gpu=EVEN), nic=1.0, nvlink=1e9, **no_latency)
    for kind, share in (("ring", 1), ("all-to-all", 8)):
        transfer = timeline(cluster).collective("x", everyone(cluster), 15.0, kind)
        # 8 of 15 other ranks are in the other node, whose 8 NICs carry 1 byte per second each.
        assert transfer.end - transfer.begin == pytest.approx(share * 8 / 8)


def test_two_collectives_of_a_rank_use_its_port_one_after_another():
    cluster = Cluster(4, gpu=EVEN)
    line = timeline(cluster)
    first = line.collective("a", everyone(cluster), 1e9)
    second = line.collective("b", everyone(cluster), 1e9)
    assert np.all(second.begin == first.end)


def test_groups_of_a_side_do_not_wait_for_each_other():
    cluster = Cluster(4, gpu=EVEN)
    line = timeline(cluster)
    line.now = np.array([0.0, 1.0, 0.0, 2.0])
    rows, cols = Grid((2, 2)).sides(cluster)
    assert line.collective("a", rows, 1e3).begin.tolist() == [1, 1, 2, 2]
    assert timeline(cluster).collective("a", cols, 1e3).begin.tolist() == [0] * 4
    again = timeline(cluster)
    again.now = np.array([0.0, 1.0, 0.0, 2.0])
    assert again.collective("a", cols, 1e3).begin.tolist() == [0, 2, 0, 2]


def test_a_computation_beside_a_transfer_is_slower_while_it_lasts():
    gpu = replace(EVEN, slowdown=0.5)
    cluster = replace(Cluster(2, gpu=gpu), base_latency=0.0, nvlink_latency=0.0, nvlink=1.0)
    line = timeline(cluster)
    line.collective("gather", everyone(cluster), 4.0)  # 4 s at the full rate
    line.compute("products", 3.0)  # 2 of them beside it
    assert line.now == pytest.approx([5.0, 5.0])


def test_single_transfers_between_nodes_use_one_nic():
    cluster = replace(Cluster(16, gpu=EVEN), base_latency=0.0, nvlink_latency=0.0)
    transfer = timeline(replace(cluster, network_latency=0.0)).exchange("ring step", 1e9)
    seconds = transfer.end - transfer.begin
    assert seconds[0] == seconds[7] == seconds[8] == seconds[15] == pytest.approx(1e9 / 44e9)
    assert seconds[1] == seconds[9] == pytest.approx(1e9 / cluster.nvlink)


def test_without_transfers_only_an_all_reduce_remains():
    cluster = Cluster(2)
    line = WithoutTransfers(cluster, Speeds(Spread(), 2, 0))
    line.now = np.array([1.0, 2.0])
    line.wait(line.collective("gather", everyone(cluster), 1e9))
    line.wait(line.exchange("ring step", 1e9))
    assert line.now.tolist() == [1.0, 2.0]
    line.wait(line.collective("scale", everyone(cluster), 4.0, "tree"))
    assert np.all(line.now > 2.0)
    assert line.received == 4


@pytest.mark.parametrize("schedule", [Grid((16, 1)), Grid((4, 4), 1 << 20), Grid((2, 8)), Ring()])
def test_each_resource_serves_one_event_at_a_time(schedule):
    log = []
    schedule.run(Workload(4096, 256), timeline(Cluster(16, per_node=4, nics=4), log))
    assert {event.name for event in log} > {"scale's gradient"}
    for resource in ("compute", "port", "nic"):
        events = [event for event in log if resource in event.resources]
        for before, after in itertools.pairwise(events):
            assert np.all(after.begin >= before.end)
            assert np.all(after.end >= after.begin)


def test_the_lasting_speed_and_the_drift_have_their_spreads():
    spread = Spread(lasting=0.01, drift=0.02, memory=0.03)
    long = Speeds(replace(spread, drift=0.0), 20_000, 0).seconds(1.0)
    assert np.std(long) == pytest.approx(0.01, rel=0.05)
    for seconds in (0.001, 0.03, 0.3):
        speeds = Speeds(replace(spread, lasting=0.0), 20_000, 1)
        speeds.seconds(0.05)  # from another state
        found = np.std(speeds.seconds(seconds)) / seconds
        assert found == pytest.approx(spread.deviation(seconds), rel=0.05)
    assert spread.deviation(1e-6) == pytest.approx(0.02, rel=1e-3)
    assert spread.deviation(3.0) == pytest.approx(0.02 * (2 * 0.03 / 3.0) ** 0.5, rel=0.02)


# --- the same ring by an event queue --------------------------------------------------------------


def by_queue(ranks, steps, compute, transfer):
    """When each rank of a ring ends, by a queue of events.

    A rank begins a step's computation and its exchange at once; the exchange begins when both
    neighbours have come to it, and the next step when the computation, the exchange with the rank
    before and that with the rank after have ended.
    """
    queue = [(0.0, rank, "begin", 0) for rank in range(ranks)]
    began, open_, ends = {}, {}, [0.0] * ranks
    while queue:
        now, rank, kind, step = heapq.heappop(queue)
        if kind == "end":
            open_[rank, step] -= 1
            if open_[rank, step] == 0:
                ends[rank] = now
                if step + 1 < steps:
                    heapq.heappush(queue, (now, rank, "begin", step + 1))
            continue
        began[rank, step] = now
        open_[rank, step] = 3
        heapq.heappush(queue, (now + compute[step][rank], rank, "end", step))
        for sender, receiver in ((rank - 1) % ranks, rank), (rank, (rank + 1) % ranks):
            if (sender, step) in began and (receiver, step) in began:
                at = now + transfer[receiver]
                heapq.heappush(queue, (at, sender, "end", step))
                heapq.heappush(queue, (at, receiver, "end", step))
    return ends


def test_a_ring_is_as_by_an_event_queue():
    cluster = Cluster(8, per_node=4, nics=4, gpu=replace(EVEN, slowdown=0.0, occupied=0.0))
    random, steps, sent = np.random.default_rng(0), 20, 1e8
    compute = 3e-3 * random.random((steps, 8))
    line = timeline(cluster)
    for seconds in compute:
        transfer = line.exchange("ring step", sent)
        line.now = line.now + seconds  # a computation with times of our own
        line.wait(transfer)
    within = cluster.base_latency + cluster.nvlink_latency + sent / cluster.nvlink
    between = cluster.base_latency + cluster.network_latency + sent / cluster.nic
    transfer = [between if rank % 4 == 0 else within for rank in range(8)]
    assert line.now == pytest.approx(by_queue(8, steps, compute, transfer), rel=1e-12)
