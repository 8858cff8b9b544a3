"""Ranks on the two hosts of a `hosts.Network`, which serve calls that come as lines of JSON."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import IO, Any

import torch
import torch.distributed as dist

from machinery.hosts import NAMES, Network

#: Seconds that a rank has for an answer beyond the limit of its group.
SPARE = 60.0
#: Port of rank 0's store, inside its host.
_PORT = 29500
_TIMEOUT = "TWO_HOSTS_TIMEOUT"


class Ranks:
    """As many ranks on each host, those of the first host first, in one Gloo group.

    They end with their hosts.
    """

    def __init__(
        self, network: Network, program: str, per_host: int, timeout: float, late: float = 0.0
    ) -> None:
        """Start the ranks and wait until they form a group.

        Args:
            network: of the hosts.
            program: the file that calls `serve`.
            per_host: ranks on each host.
            timeout: of the group, in seconds.
            late: seconds after the others at which the last rank starts.
        """
        self.per_host, self.size = per_host, per_host * len(network.hosts)
        self.timeout = timeout
        common = {"MASTER_ADDR": NAMES[0], "MASTER_PORT": str(_PORT), "OMP_NUM_THREADS": "1"}
        common |= {"WORLD_SIZE": str(self.size), _TIMEOUT: str(timeout)}
        self._processes: list[subprocess.Popen[bytes]] = []
        for rank in range(self.size):
            if rank == self.size - 1:
                time.sleep(late)
            self._processes.append(
                network.hosts[rank // per_host].start(
                    [sys.executable, program],
                    common | {"RANK": str(rank)},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                )
            )
        #: Seconds in which each rank joined the group, from the start of its own process.
        self.joined = self._values(self.answers())

    def ask(self, name: str, ranks: Sequence[int] | None = None, **arguments: Any) -> None:
        """Have ranks (all if None) make a call."""
        line = json.dumps([name, arguments]).encode() + b"\n"
        for rank in range(self.size) if ranks is None else ranks:
            stream = self._processes[rank].stdin
            assert stream is not None
            stream.write(line)
            stream.flush()

    def answers(self, ranks: Sequence[int] | None = None) -> list[dict[str, Any]]:
        """The ranks' answers: `value` or `error`, and `at`, of this machine's monotonic clock.

        A rank that ended without one, or has given none in time, has an `error` that says so.
        """
        until = time.monotonic() + self.timeout + SPARE
        found = []
        for rank in range(self.size) if ranks is None else ranks:
            stream = self._processes[rank].stdout
            assert stream is not None
            ready, _, _ = select.select([stream], [], [], max(0.0, until - time.monotonic()))
            line = stream.readline() if ready else b""
            if line:
                found.append(json.loads(line))
            elif ready:
                found.append({"error": "ended without an answer"})
            else:
                found.append({"error": f"no answer within {self.timeout + SPARE:g} s"})
        return found

    def call(self, name: str, **arguments: Any) -> list[Any]:
        """Every rank's value.

        Raises:
            RuntimeError: a rank failed.
        """
        self.ask(name, **arguments)
        return self._values(self.answers())

    def _values(self, answers: Sequence[Mapping[str, Any]]) -> list[Any]:
        for rank, answer in enumerate(answers):
            if "error" in answer:
                raise RuntimeError(f"rank {rank}: {answer['error']}")
        return [answer["value"] for answer in answers]

    def exit_codes(self, ranks: Sequence[int]) -> list[int | None]:
        """The exit codes of ranks that are about to end; None for one that does not."""
        codes: list[int | None] = []
        for rank in ranks:
            try:
                codes.append(self._processes[rank].wait(SPARE))
            except subprocess.TimeoutExpired:
                codes.append(None)
        return codes


def serve(calls: Mapping[str, Callable[..., Any]]) -> None:
    """A rank: join the group, answer calls until standard input ends or one of them fails.

    Then the process ends, with exit code 1 after the error.
    """
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries' output goes to stderr
    torch.set_num_threads(1)
    began = time.monotonic()
    dist.init_process_group("gloo", timeout=timedelta(seconds=float(os.environ[_TIMEOUT])))
    _answer(out, value=time.monotonic() - began)
    for line in sys.stdin:
        name, arguments = json.loads(line)
        try:
            value = calls[name](**arguments)
        except Exception as error:
            _answer(out, error=f"{type(error).__name__}: {error}")
            sys.exit(1)
        _answer(out, value=value)


def _answer(out: IO[str], **content: Any) -> None:
    print(json.dumps({**content, "at": time.monotonic()}), file=out, flush=True)
