"""Between GPUs of one host: pieces pushed by copy engines, which take no multiprocessor.

NCCL sends with kernels. cuBLAS's products on Hopper are one wave of programs that stay to the end:
those whose multiprocessors a kernel of NCCL holds begin when the others are done, and a product
takes up to twice as long, however few multiprocessors NCCL is allowed (262,144 x 768 on 2 H200s:
379 ms with NCCL, 387 with two channels of it, 360 without any transfers). And a kernel of NCCL that
waits for a rank behind holds them all the while; here waiting is the stream's, until a number in
this rank's memory has been written by the other.

Every rank has an arena that the others can write to (torch's symmetric memory), of two halves. What
exchange s brings lies in half s % 2, where exchange s + 2 may overwrite it: by then the ring has
used it up.
"""

from __future__ import annotations

import ctypes
import logging
import math
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from megabatch.errors import CommunicationError
from megabatch.similarity import exchange

log = logging.getLogger(__name__)

#: Tensors in an arena begin at multiples of this; bytes.
ALIGNED = 256
#: Tensors that one exchange may bring.
MOST = 8
#: Seconds that a trial copy may take.
PATIENCE = 20.0

_lanes: WeakKeyDictionary[dist.ProcessGroup, Lane | None] = WeakKeyDictionary()
_wanted = True


def set_peer_copies(on: bool) -> bool:
    """Whether GPUs of one host copy to each other (at the start: yes); returns how it was before.

    Off, NCCL sends. All ranks must set the same; it changes no result.
    """
    global _wanted
    before, _wanted = _wanted, bool(on)
    return before


def state(group: dist.ProcessGroup) -> str:
    """How this group's ranks exchange pieces, in words that all ranks must agree on."""
    lane = _lanes.get(group)
    if lane is None:
        return "copied where possible" if _wanted else "sent"
    return f"copied ({lane.count} times so far)"


def lane_of(group: dist.ProcessGroup, device: torch.device, size: int) -> Lane | None:
    """This group's lane, for exchanges that bring up to `size` bytes; None where there can be none.

    All ranks call it alike. The first call, and one with a larger size, makes the lane: it waits
    for the other ranks and this rank's GPU.
    """
    if not _wanted or device.type != "cuda":
        return None
    known = _lanes.get(group)
    if group in _lanes and (known is None or known.size >= size):
        return known
    _lanes[group] = None  # frees the smaller one
    del known
    _lanes[group] = _opened(group, device, size)
    return _lanes[group]


def held_bytes() -> int:
    """What the arenas of this process take, which torch's allocator knows nothing of."""
    return sum(lane.arena.nbytes for lane in _lanes.values() if lane is not None)


class Lane:
    """This rank's arena, the others' as this rank's GPU sees them, and the stream of copies."""

    def __init__(self, group: dist.ProcessGroup, size: int, arena: Tensor, handle: Any) -> None:
        """`arena` is this rank's, `handle` what the ranks made of their arenas together."""
        self.rank, self.n, self.size = group.rank(), group.size(), size
        self.arena, self._handle = arena, handle
        shape = tuple(arena.shape)
        self._arenas = [
            arena if rank == self.rank else handle.get_buffer(rank, shape, arena.dtype)
            for rank in range(self.n)
        ]
        self.stream = torch.cuda.Stream(arena.device)
        self._user: torch.cuda.Stream | None = None
        #: exchanges so far, the same on all ranks
        self.count = 0

    def place(self, number: int) -> int:
        """Where the half for exchange `number` begins, behind the numbers that ranks write."""
        return _flag_bytes(self.n) + number % 2 * self.size

    def received(self, start: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """What lies in this rank's arena from there on."""
        size = math.prod(shape) * dtype.itemsize
        return self.arena[start : start + size].view(dtype).view(tuple(shape))

    def swap(
        self, number: int, to: int, source: int, parts: Sequence[tuple[Tensor, int]]
    ) -> torch.cuda.Event:
        """Push tensors to their places at rank `to`; the event: done, and `source` has as well."""
        user = torch.cuda.current_stream(self.arena.device)
        self.stream.wait_stream(user)
        if self._user is not None and self._user != user:
            self.stream.wait_stream(self._user)  # which may still read what this overwrites
        self._user = user
        ready, done = 0, self.n  # numbers by the rank that writes them
        handle = self.stream.cuda_stream
        with torch.cuda.stream(self.stream):
            _write(handle, self._flag(source, ready + self.rank), number)
            _wait(handle, self._flag(self.rank, ready + to), number)
            for tensor, start in parts:
                target = self._arenas[to][start : start + tensor.nbytes]
                target.copy_(tensor.view(-1).view(torch.uint8), non_blocking=True)
            _write(handle, self._flag(to, done + self.rank), number)
            _wait(handle, self._flag(self.rank, done + source), number)
        return self.stream.record_event()

    def join(self, event: torch.cuda.Event) -> None:
        """Let the caller's stream wait for it."""
        torch.cuda.current_stream(self.arena.device).wait_event(event)

    def release(self) -> None:
        """Let this rank's stream wait for nobody any more."""
        self.arena[: _flag_bytes(self.n)].view(torch.int32).fill_(1 << 30)
        self.stream.synchronize()

    def _flag(self, rank: int, index: int) -> int:
        """The address of a number at a rank."""
        return self._arenas[rank].data_ptr() + 4 * index


class PeerSwap:
    """As `exchange.Swap`, over a lane. At most one is being added to at a time."""

    def __init__(self, lane: Lane, to: int, source: int, what: str) -> None:
        self._lane, self._to, self._source, self.what = lane, to, source, what
        lane.count += 1
        self._number = lane.count
        self._begin = lane.place(self._number)
        self._sent = self._coming = self._begin
        self._parts: list[tuple[Tensor, int]] = []
        self._event: torch.cuda.Event | None = None

    def add(self, outgoing: Tensor, size: int, dim: int = 0) -> Tensor:
        """See `exchange.Swap.add`; what comes lies in the arena until the exchange after next."""
        shape = list(outgoing.shape)
        shape[dim] = size
        incoming = self._lane.received(self._coming, shape, outgoing.dtype)
        self._coming += _aligned(incoming.nbytes)
        # The receiver counts the same sizes.
        self._parts.append((outgoing.contiguous(), self._sent))
        self._sent += _aligned(outgoing.nbytes)
        assert max(self._sent, self._coming) <= self._begin + self._lane.size
        return incoming

    def done(self) -> bool:
        """Whether all is here, as the host sees it."""
        return self._event is None or self._event.query()

    def start(self) -> None:
        """Begin all copies."""
        if self._parts:
            try:
                self._event = self._lane.swap(self._number, self._to, self._source, self._parts)
            except RuntimeError as error:
                raise CommunicationError(f"{self.what}: {error}") from error

    def wait(self) -> None:
        """Until all is here and all has gone, for this rank's stream."""
        if self._event is not None:
            self._lane.join(self._event)
        self._event, self._parts = None, []


def slot_bytes(row_bytes: int, rows: int) -> int:
    """Of an exchange that brings `rows` rows."""
    return _aligned(row_bytes * rows) + MOST * ALIGNED


def _aligned(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED


def _flag_bytes(ranks: int) -> int:
    return _aligned(2 * 4 * ranks)


# --- making a lane --------------------------------------------------------------------------------


def _opened(group: dist.ProcessGroup, device: torch.device, size: int) -> Lane | None:
    """A lane, if every rank can: each step is one that all ranks take or none does."""
    try:
        import torch.distributed._symmetric_memory as symmetric

        arena = symmetric.empty(
            _flag_bytes(group.size()) + 2 * size, dtype=torch.uint8, device=device
        )
        arena[: _flag_bytes(group.size())].zero_()
        torch.cuda.synchronize(device)
        _driver()
    except Exception as error:  # whatever is missing: NCCL can do without
        _tell(error)
        arena = None
    if not _all(group, device, arena is not None):
        return None
    assert arena is not None
    lane = None
    try:
        lane = Lane(group, size, arena, symmetric.rendezvous(arena, group.group_name))
        _prove(lane)
    except Exception as error:
        _tell(error)
        lane = None
    return lane if _all(group, device, lane is not None) else None


def _prove(lane: Lane) -> None:
    """Exchange a few bytes with every rank.

    Raises:
        RuntimeError: they do not come in time, or are others.
    """
    own = torch.full((ALIGNED,), lane.rank, dtype=torch.uint8, device=lane.arena.device)
    for distance in range(1, lane.n):
        to, source = (lane.rank + distance) % lane.n, (lane.rank - distance) % lane.n
        swap = PeerSwap(lane, to, source, "trial of copies between GPUs")
        got = swap.add(own, ALIGNED)
        swap.start()
        deadline = time.monotonic() + PATIENCE
        while not swap.done():
            if time.monotonic() > deadline:
                lane.release()
                raise RuntimeError(f"a copy between ranks {lane.rank} and {to} or {source} hangs")
            time.sleep(1e-3)
        swap.wait()
        if not bool((got == source).all()):
            raise RuntimeError(f"a copy from rank {source} to rank {lane.rank} came out wrong")


def _tell(error: Exception) -> None:
    log.info("GPUs do not copy to each other, NCCL sends instead: %s", error)


def _all(group: dist.ProcessGroup, device: torch.device, fine: bool) -> bool:
    """Whether it is fine on every rank, and they are all on one host."""
    name = group.group_name
    shown = exchange.agree(name, "copies between GPUs", [int(fine), _host()], device)
    return all(row == [1, shown[0][1]] for row in shown)


def _host() -> int:
    """A number that processes on other hosts do not have."""
    try:
        text = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return 0
    return int(text.replace("-", "")[:15], 16)


# --- numbers that streams write and wait for ------------------------------------------------------


@cache
def _driver() -> Any:
    driver = ctypes.CDLL("libcuda.so.1")
    for name in ("cuStreamWriteValue32_v2", "cuStreamWaitValue32_v2"):
        function = getattr(driver, name)
        function.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint]
        function.restype = ctypes.c_int
    return driver


def _write(stream: int, address: int, number: int) -> None:
    """Once what the stream did before can be seen everywhere."""
    _check(_driver().cuStreamWriteValue32_v2(stream, address, number & 0xFFFFFFFF, 0))


def _wait(stream: int, address: int, number: int) -> None:
    """Until the number there is this one or a later one, counted in a circle."""
    _check(_driver().cuStreamWaitValue32_v2(stream, address, number & 0xFFFFFFFF, 0))


def _check(code: int) -> None:
    if code:
        raise RuntimeError(f"the CUDA driver refused a stream's memory operation, error {code}")
