"""The memory that a computation's tensors would take, and its work, counted without running it.

Fake tensors (`FakeTensorMode`) have shapes, dtypes and devices, but no values: operations on them
take no time and no memory, for any device, present or not. The counter adds up the tensors that
are alive, as an allocator would: one is freed with its last reference, including autograd's.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from megabatch.torch_internals import (
    TorchDispatchMode,
    fake_tensor_mode,
    storage_key,
    tree_leaves,
)

#: CUDA's allocator rounds sizes up to multiples of this.
UNIT = 512
#: Attention counts in whole tiles of so many queries and keys. That kernels compute whole tiles is
#: assumed; it brings towers of short and of long sequences to one rate (benchmarks/plan_check.py).
_TILE = 128
#: Formulas by an operation's name. That of attention on the CPU, which torch lacks before 2.15, is
#: that of the GPU's kernel.
_FORMULAS = {str(packet): formula for packet, formula in flop_registry.items()}
#: Names of operations with products. Those of a matrix and a vector take the time of reading the
#: matrix, which counts.
_PRODUCTS = re.compile(
    r"(^|[._])(b?mm|addb?mm|baddbmm|matmul|(bi)?linear|attention|rnn"
    r"|conv(olution)?|conv(_depthwise)?\dd)(_|$)"
)


class Work(NamedTuple):
    """The work of some operations, each of which is a kernel that reads inputs and writes results.

    Attributes:
        flops: floating-point operations of matrix products and attention; convolved: of
            convolutions.
        nbytes, kernels: of all of these: bytes read and written, and launches.
        other_bytes, other_kernels: of all other operations, which torch.compile fuses.
    """

    flops: float = 0
    convolved: float = 0
    nbytes: float = 0
    kernels: float = 0
    other_bytes: float = 0
    other_kernels: float = 0

    def plus(self, other: Work, times: float = 1) -> Work:
        """The sums with so many times another one's numbers."""
        return Work(*(one + times * more for one, more in zip(self, other, strict=True)))


def work_of(overload: Any, args: Sequence[Any], kwargs: Mapping[str, Any], results: Any) -> Work:
    """The work of one operation; none for a view.

    Raises:
        LookupError: it is a product, and torch's counter has no formula for it.
    """
    name = str(getattr(overload, "overloadpacket", overload)).replace("_for_cpu", "")
    read = {storage_key(t.untyped_storage()): t.nbytes for t in tensors_in((args, kwargs))}
    made = {storage_key(t.untyped_storage()): t.nbytes for t in tensors_in(results)}
    is_view = not name.endswith("_") and made.keys() <= read.keys()
    if is_view or name.rpartition(".")[2].startswith("empty"):
        return Work()
    nbytes = sum(read.values()) + sum(made.values())
    if name not in _FORMULAS:
        if _PRODUCTS.search(name):
            raise LookupError(f"torch {torch.__version__} has no formula for the work of {name}")
        return Work(other_bytes=nbytes, other_kernels=1)
    flops = int(_FORMULAS[name](*args, **kwargs, out_val=results))
    if "conv" in name:
        return Work(convolved=flops, nbytes=nbytes, kernels=1)
    if "scaled_dot_product" in name:
        tensors = args[1:] if "backward" in name else args  # the output's gradient comes first
        for length in (tensor.shape[2] for tensor in tensors[:2]):
            flops = flops * -(-length // _TILE) * _TILE // max(1, length)
    return Work(flops=flops, nbytes=nbytes, kernels=1)


class Counter(TorchDispatchMode):
    """Counts the work of operations, and the bytes of tensors that they create, while these live.

    Attributes:
        live, peak: bytes now, and the maximum since `start`.
        work: of the operations since then.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.work = Work()
        self._known: set[int] = set()

    def start(self) -> int:
        """Reset the peak and the work; returns the bytes that are live now."""
        self.peak, self.work = self.live, Work()
        return self.live

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        results = function(*args, **(kwargs or {}))
        done = work_of(function, args, kwargs or {}, results)
        self.work = self.work.plus(done)
        for result in tensors_in(results):
            self._count(result)
        self.peak = max(self.peak, self.live)
        return results

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage_key(storage)
        if key in self._known:
            return
        size = -(-storage.nbytes() // UNIT) * UNIT
        self._known.add(key)
        self.live += size
        weakref.finalize(storage, self._free, key, size)

    def _free(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size


@contextmanager
def counted() -> Iterator[Counter]:
    """Within this context new tensors are fake, and operations on them are counted."""
    with fake_tensor_mode(allow_non_fake_inputs=True), Counter() as counter:
        yield counter


def fake_copies(module: torch.nn.Module, device: torch.device) -> dict[str, Tensor]:
    """Fake copies of a module's parameters and buffers on a device, by name; call in `counted`."""
    copies: dict[Tensor, Tensor] = {}
    named = [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]
    for _, tensor in named:
        if tensor not in copies:
            copy = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
            copies[tensor] = copy.requires_grad_(tensor.requires_grad)
    return {name: copies[tensor] for name, tensor in named}


def tensors_in(results: Any) -> list[Tensor]:
    """The tensors among an operation's results or arguments."""
    return [leaf for leaf in tree_leaves(results) if isinstance(leaf, Tensor)]
