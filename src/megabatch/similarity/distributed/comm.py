"""Groups of ranks: their names, what they must agree on, and transfers of tensors."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from megabatch import torch_internals
from megabatch.errors import CommunicationError
from megabatch.similarity.distributed import control
from megabatch.torch_internals import constant_in_graphs

if TYPE_CHECKING or dist.is_available():
    from torch.distributed.device_mesh import DeviceMesh

_all_gather: Any
_reduce_scatter: Any
if hasattr(dist, "all_gather_single"):  # torch 2.13 and newer, of which some deprecate other names
    _all_gather, _reduce_scatter = dist.all_gather_single, dist.reduce_scatter_single
elif dist.is_available():
    _all_gather, _reduce_scatter = dist.all_gather_into_tensor, dist.reduce_scatter_tensor

#: Bytes of a rank's terms in a handshake.
TERMS = 1024

# --- names ----------------------------------------------------------------------------------------


def group_name(group: object) -> str:
    """The name of a group for operators; "" if this process is alone.

    Args:
        group: a process group, None for the default one where torch.distributed is initialised,
            "local" for this process alone, or a DeviceMesh of one dimension.

    Raises:
        TypeError: `group` is none of these.
        ValueError: this process is no member of the group, or a mesh has more dimensions.
    """
    available = dist.is_available()
    if (isinstance(group, str) and group == "local") or (
        group is None and not (available and dist.is_initialized())
    ):
        return ""
    if available and isinstance(group, DeviceMesh):
        return _name_of_mesh(group)
    if available and group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("group: expected a group that this process is a member of")
    if group is None:
        group = dist.group.WORLD
    if not available or not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"group: expected None, 'local' or a process group or DeviceMesh, got {group!r}"
        )
    return group.group_name if group.size() > 1 else ""


@constant_in_graphs
def _name_of_mesh(mesh: DeviceMesh) -> str:
    if mesh.get_coordinate() is None:
        raise ValueError("group: expected a mesh that this process is a member of")
    if mesh.ndim > 1:
        raise ValueError(
            f"group: expected a mesh of one dimension, got {mesh.ndim}; None is the group of all "
            "ranks, which megabatch.similarity.set_grid(columns) makes a grid"
        )
    return group_name(mesh.get_group())


def resolve(name: str) -> dist.ProcessGroup:
    """The group of that name."""
    return torch_internals.resolve_group(name)


def rank_and_size(group: object) -> tuple[int, int]:
    """This process's rank in a group, as `group_name` takes it, and the group's size."""
    name = group_name(group)
    return _rank_and_size(name) if name else (0, 1)


@constant_in_graphs
def _rank_and_size(name: str) -> tuple[int, int]:
    return resolve(name).rank(), resolve(name).size()


# --- the handshake --------------------------------------------------------------------------------


def agree(name: str, terms: str, numbers: Sequence[int], device: torch.device) -> list[list[int]]:
    """Exchange numbers between ranks with the same terms; if terms differ, an error on every rank.

    One small exchange between hosts: it waits for other hosts, never for a device.

    Args:
        name: of the group.
        terms: a description of what the ranks must agree on, beginning with the operation's name.
        numbers: up to 8 to exchange, the same count on each rank.
        device: where the features are.

    Raises:
        ValueError: the ranks disagree; the message says what each had.
        CommunicationError: a rank is gone or sends nothing in time.
    """
    group, operation = resolve(name), terms.split(",", 1)[0]
    head = struct.Struct(f"{len(numbers)}q")
    text = terms.encode()[:TERMS].ljust(TERMS)
    with failures_of(f"{operation}: before the first transfer, rank {dist.get_rank()}"):
        shown = control.channel(group, device).gather(text + head.pack(*numbers).ljust(64))
    had: dict[str, list[str]] = {}  # the ranks with these terms
    for rank, row in zip(dist.get_process_group_ranks(group), shown, strict=True):
        had.setdefault(row[:TERMS].decode().strip(), []).append(str(rank))
    if len(had) > 1:
        each = (
            f"{'rank' if len(who) == 1 else 'ranks'} {', '.join(who)}: {what}"
            for what, who in had.items()
        )
        raise ValueError("group: expected the same call on all ranks, got " + "; ".join(each))
    return [list(head.unpack_from(row, TERMS)) for row in shown]


@contextmanager
def failures_of(what: str) -> Iterator[None]:
    """Name the operation in errors of transfers, which become `CommunicationError`s."""
    try:
        yield
    except RuntimeError as error:
        raise CommunicationError(f"{what}: {error}") from error


# --- transfers ------------------------------------------------------------------------------------


class Pending:
    """A collective under way; its operands must not change until `wait`."""

    def __init__(self, result: Tensor, end: Callable[[], None] | None = None) -> None:
        """`result` is filled when `end`, which waits, returns; None: it is filled already."""
        self.result, self._end = result, end

    def wait(self) -> Tensor:
        """The result, after its end: on the CPU in this thread, on a GPU in its stream."""
        if self._end is not None:
            self._end()
        self._end = None
        return self.result


def _begin(
    collective: Callable[..., Any],
    result: Tensor,
    *given: Any,
    group: dist.ProcessGroup,
    what: str,
    hidden: bool = True,
) -> Pending:
    """Begin a collective; `hidden`: something may be computed meanwhile."""
    what = f"{what}, rank {dist.get_rank()}"
    # A GPU's stream that waits at once needs no `Work`.
    asynchronous = hidden or not result.is_cuda
    with failures_of(what):
        work = collective(result, *given, group=group, async_op=asynchronous)

    def end() -> None:
        with failures_of(what):
            if work is not None:
                work.wait()

    return Pending(result, end)


def all_reduce(tensor: Tensor, name: str, operation: str, how: Any = dist.ReduceOp.SUM) -> Tensor:
    """`tensor` (changed in place) reduced over the group of that name."""
    group, what = resolve(name), f"{operation}: all-reduce"
    return _begin(dist.all_reduce, tensor, how, group=group, what=what, hidden=False).wait()


def all_gather(
    shard: Tensor, group: dist.ProcessGroup, operation: str, out: Tensor | None = None
) -> Pending:
    """All ranks' (m, ...) as (n, m, ...); shapes are the same on all ranks.

    out: (n m, ...), contiguous, to be filled; None: a new one.
    """
    if out is None:
        out = shard.new_empty((group.size() * len(shard), *shard.shape[1:]))
    what = f"{operation}: gathering"
    pending = _begin(_all_gather, out, shard.contiguous(), group=group, what=what)
    pending.result = out.view(group.size(), *shard.shape)
    return pending


def reduce_scatter(parts: Tensor, group: dist.ProcessGroup, operation: str) -> Pending:
    """This rank's (m, ...) of the sum over ranks of (n m, ...), in place."""
    size, rank = parts.shape[0] // group.size(), group.rank()
    total, what = parts[rank * size :][:size], f"{operation}: adding up all ranks' results"
    return _begin(_reduce_scatter, total, parts, group=group, what=what)


def all_to_all(parts: Tensor, group: dist.ProcessGroup, operation: str) -> Tensor:
    """(n, ...): from every rank its part for this one, of (n, ...) each; waits for them."""
    own, what = torch.empty_like(parts), f"{operation}: exchanging all ranks' results"
    exchange = dist.all_to_all_single
    return _begin(exchange, own, parts, group=group, what=what, hidden=False).wait()
