"""Peak memory of a call, and an end to it."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import torch


def extra_bytes(call: Callable[[], object], device: str) -> int:
    """Peak memory during `call` above what is in use before it.

    On the CPU this is resident memory, whose peak is kept for the process as a whole: only the
    first large call of a process can be measured.
    """
    if device != "cpu":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    before = psutil.Process().memory_info().rss
    call()
    return max(0, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before)


@contextlib.contextmanager
def at_most(extra: int) -> Iterator[None]:
    """Let this process allocate `extra` bytes more than it has; what asks for more gets an error.

    Without it, Linux grants more than there is and then kills a process, perhaps another one.
    """
    before = resource.getrlimit(resource.RLIMIT_DATA)
    hard = before[1]
    wanted = _data_bytes() + extra
    soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def be_killed_first() -> None:
    """Where memory runs out all the same, Linux ends this process and no other."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed: torch has one class for this on CUDA and none on the CPU."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def _data_bytes() -> int:
    """What RLIMIT_DATA counts."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("no VmData in /proc/self/status")
