"""The work of operations: floating-point operations, and bytes read from and written to memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

from torch.utils.flop_counter import flop_registry

from megabatch.torch_internals import storage_key, tensors_in


@dataclass(frozen=True)
class Work:
    """The work of some operations.

    Attributes:
        flops: of matrix products and attention.
        convolved: floating-point operations of convolutions.
        nbytes: read from and written to memory, those of inputs and results of each kernel.
        kernels: launches.
    """

    flops: int = 0
    convolved: int = 0
    nbytes: int = 0
    kernels: int = 0

    def __add__(self, other: Work) -> Work:
        pairs = zip(astuple(self), astuple(other), strict=True)
        return Work(*(own + more for own, more in pairs))

    def __mul__(self, factor: float) -> Work:
        return Work(*(int(own * factor) for own in astuple(self)))

    def __sub__(self, other: Work) -> Work:
        return self + other * -1


def is_product(overload: Any) -> bool:
    """Whether an operation is a matrix product, attention or a convolution: a library's kernel."""
    return getattr(overload, "overloadpacket", None) in flop_registry


#: Attention counts in whole tiles of so many queries and keys. That kernels compute whole tiles is
#: assumed; it brings towers of short and of long sequences to one rate (benchmarks/plan_check.py).
_TILE = 128


def _attended(packet: str, args: Sequence[Any], flops: int) -> int:
    """The operations of attention, with those on the unused parts of tiles."""
    tensors = args[1:] if "backward" in packet else args  # the output's gradient comes first
    queries, keys = (tensor.shape[2] for tensor in tensors[:2])
    whole = [-(-length // _TILE) * _TILE for length in (queries, keys)]
    return int(flops * whole[0] / max(1, queries) * whole[1] / max(1, keys))


def kernel_work(
    overload: Any, args: Sequence[Any], kwargs: Mapping[str, Any], results: Any, nbytes: int
) -> Work:
    """The work of an operation that is a kernel and reads and writes so many bytes."""
    packet = getattr(overload, "overloadpacket", None)
    formula = flop_registry.get(packet)
    flops = 0 if formula is None else int(formula(*args, **kwargs, out_val=results))
    if "conv" in str(packet):
        return Work(convolved=flops, nbytes=nbytes, kernels=1)
    if "scaled_dot_product" in str(packet):
        flops = _attended(str(packet), args, flops)
    return Work(flops=flops, nbytes=nbytes, kernels=1)


def work_of(overload: Any, args: Sequence[Any], kwargs: Mapping[str, Any], results: Any) -> Work:
    """The work of one operation that runs as a kernel of its own; none for a view."""
    name = str(getattr(overload, "overloadpacket", overload)).rpartition(".")[2]
    read = {storage_key(t.untyped_storage()): t.nbytes for t in tensors_in((args, kwargs))}
    made = {storage_key(t.untyped_storage()): t.nbytes for t in tensors_in(results)}
    in_place = name.endswith("_")
    if name.startswith("empty") or (not in_place and made.keys() <= read.keys()):
        return Work()
    nbytes = sum(read.values()) + sum(made.values())
    return kernel_work(overload, args, kwargs, results, nbytes)
