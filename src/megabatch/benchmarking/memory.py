"""Peak memory of a call, and limits to it."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import torch


def extra_bytes(call: Callable[[], object], device: str) -> int:
    """Peak memory during `call` above what is in use before it; resident memory on the CPU."""
    if device != "cpu":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    # Not getrusage's ru_maxrss, which a process inherits from its parent.
    with contextlib.suppress(OSError):  # if this is forbidden, the peak since the start counts
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    before = _status_bytes("VmRSS")
    call()
    return max(0, _status_bytes("VmHWM") - before)


@contextlib.contextmanager
def at_most(extra: int) -> Iterator[None]:
    """Let this process allocate at most `extra` further bytes; beyond that allocations fail.

    Without a limit Linux overcommits memory and then kills a process, possibly another one.
    """
    before = resource.getrlimit(resource.RLIMIT_DATA)
    hard = before[1]
    wanted = _status_bytes("VmData") + extra
    soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def be_killed_first() -> None:
    """Make this process the first that Linux kills if memory runs out."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, for which torch has an exception class on CUDA only."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def reason(error: BaseException) -> str:
    """The failed request in one line."""
    text = str(error).strip().split("\n")[0] or type(error).__name__
    return text[max(0, text.find("tried to allocate")) :]


def _status_bytes(name: str) -> int:
    """A figure of this process in bytes: VmRSS resident, VmHWM its peak, VmData allocated."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"no {name} in /proc/self/status")
