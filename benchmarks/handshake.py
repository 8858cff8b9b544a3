"""Latency of exchanging a few bytes between the hosts of several processes: sockets, Gloo.

    python benchmarks/handshake.py --output benchmarks/results/handshake.json

A loss over several processes does this once, before its first transfer: see
`megabatch.similarity.distributed.control`. Processes of one machine, Linux only.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from machinery import ranks
from megabatch import torch_internals
from megabatch.benchmarking import records
from megabatch.similarity.distributed import control

SIZE = 1088  # bytes, a loss's


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--calls", type=int, default=500, help="of each of five series")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if "RANK" not in os.environ:
        ranks.start_others(options.processes, [sys.executable, *sys.argv])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=ranks.TIMEOUT)
    group = dist.group.WORLD
    assert group is not None
    cpu = torch.device("cpu")
    channels: dict[str, control.Channel] = {"sockets": control.channel(group, cpu)}
    store = torch_internals.group_store(group)
    board = control.Board(store, group.rank(), group.size(), ranks.TIMEOUT)
    channels["gloo"] = control.GlooChannel(group._get_backend(cpu), board)
    found = {name: microseconds(channel, options.calls) for name, channel in channels.items()}
    if group.rank() == 0:
        print(json.dumps(found))
        if options.output:
            kinds = {name: type(channel).__name__ for name, channel in channels.items()}
            about = {"processes": group.size(), "bytes": SIZE, "kinds": kinds}
            command = records.command_line(options.output)
            records.write(options.output, command, [], **about, microseconds=found)
    dist.barrier()
    ranks.leave()


def microseconds(channel: control.Channel, calls: int) -> dict[str, float]:
    """Seconds of a call: the median of five series, and the fastest and slowest."""
    taken = []
    for _ in range(5):
        dist.barrier()
        began = time.perf_counter()
        for _ in range(calls):
            channel.gather(bytes(SIZE))
        taken.append(1e6 * (time.perf_counter() - began) / calls)
    low, middle, high = min(taken), statistics.median(taken), max(taken)
    return {"median": round(middle, 1), "min": round(low, 1), "max": round(high, 1)}


if __name__ == "__main__":
    main()
