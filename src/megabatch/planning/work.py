"""The work of operations: floating-point operations, and bytes read from and written to memory."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import torch
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
        # Added up for every operation, where dataclasses.astuple would take a sixth of a plan.
        return Work(
            self.flops + other.flops,
            self.convolved + other.convolved,
            self.nbytes + other.nbytes,
            self.kernels + other.kernels,
        )

    def __mul__(self, factor: float) -> Work:
        return Work(*(int(own * factor) for own in astuple(self)))

    def __sub__(self, other: Work) -> Work:
        return self + other * -1


class UncountedWork(LookupError):
    """The work of an operation with products is unknown, so no plan could be right."""


#: Formulas by an operation's name. That of attention on the CPU, which torch lacks before 2.15, is
#: that of the GPU's kernel.
_FORMULAS = {str(packet): formula for packet, formula in flop_registry.items()}

#: Names of operations with products. Those of a matrix and a vector take the time of reading the
#: matrix, which counts.
_PRODUCTS = re.compile(
    r"(^|[._])(b?mm|addb?mm|baddbmm|matmul|(bi)?linear|attention|rnn"
    r"|conv(olution)?|conv(_depthwise)?\dd)(_|$)"
)


def _name(overload: Any) -> str:
    return str(getattr(overload, "overloadpacket", overload)).replace("_for_cpu", "")


def is_product(overload: Any) -> bool:
    """Whether an operation is a matrix product, attention or a convolution: a library's kernel.

    Raises:
        UncountedWork: it is, and torch's counter has no formula for it.
    """
    name = _name(overload)
    if name not in _FORMULAS and _PRODUCTS.search(name):
        raise UncountedWork(f"torch {torch.__version__} has no formula for the work of {name}")
    return name in _FORMULAS


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
    """The work of an operation that is a kernel and reads and writes so many bytes.

    Raises:
        UncountedWork: see `is_product`.
    """
    name, flops = _name(overload), 0
    if is_product(overload):
        flops = int(_FORMULAS[name](*args, **kwargs, out_val=results))
    if "conv" in name:
        return Work(convolved=flops, nbytes=nbytes, kernels=1)
    if "scaled_dot_product" in name:
        flops = _attended(name, args, flops)
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
