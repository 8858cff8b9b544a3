"""Memory and work of one micro-batch in the towers, counted without running it.

Fake tensors (`FakeTensorMode`) have shapes, dtypes and devices, but no values: operations on them
take no time and no memory, for any device, present or not. `Counter` adds up the tensors that are
alive, as an allocator would: one is freed with its last reference, including autograd's.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.flop_counter import flop_registry

from megabatch import torch_internals
from megabatch.models import Towers
from megabatch.models.towers import Tower, locked_towers
from megabatch.planning.memory import AUTOCAST
from megabatch.torch_internals import (
    TorchDispatchMode,
    fake_tensor_mode,
    storage_key,
    tree_leaves,
)

#: What compiled blocks keep for the backward pass, as a share of what others keep. By torch's own
#: partition of both passes it is 0.90 to 0.95 for the transformers of CLIP and for glyphs; with
#: kernels of GELU, of ViT-B/32 and ViT-L/14, 0.88 (benchmarks/results/throughput.json).
COMPILED_GRAPH, WITH_GELU = 0.9, 0.88
#: CUDA's allocator rounds sizes up to multiples of this.
UNIT = 512
#: Attention counts in whole tiles of so many queries and keys. That kernels compute whole tiles is
#: assumed; it brings towers of short and of long sequences to one rate (benchmarks/plan_check.py).
_TILE = 128


def _of_attention(products: int) -> Callable[..., int]:
    """The operations of so many products of kernels whose blocks are of 64, 32 or 16 tokens."""

    def flops(qkv: Tensor, *_: Any, out_val: Any) -> int:
        n, length, _three, heads, width = qkv.shape
        rest = length % 64
        tokens = length - rest + (max(16, 1 << (rest - 1).bit_length()) if rest else 0)
        return 2 * products * n * heads * width * tokens**2

    return flops


#: Formulas by an operation's name. That of attention on the CPU, which torch lacks before 2.15, is
#: that of the GPU's kernel.
_FORMULAS: dict[str, Callable[..., int]] = {
    **{str(packet): formula for packet, formula in flop_registry.items()},
    "megabatch.short_attention": _of_attention(2),
    "megabatch.short_attention_backward": _of_attention(5),
    "megabatch.block_attention": _of_attention(2),
    "megabatch.block_attention_backward": _of_attention(7),
}


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


@dataclass(frozen=True)
class MicroBatch:
    """Bytes that one micro-batch takes besides weights, gradients of weights and inputs.

    Attributes:
        forward: peak of a forward pass without a graph.
        kept: in the graph after the forward pass.
        peak: of forward and backward pass.
        further: in a second graph, which shares autocast's casts of weights with the first.
        encode, record, backward: work of a forward pass without a graph, of one with, and of the
            backward pass.
    """

    forward: int
    kept: int
    peak: int
    further: int
    encode: Work
    record: Work
    backward: Work

    def compiled(self, with_gelu: bool) -> MicroBatch:
        """With blocks that torch.compile makes; with_gelu: they have the library's kernels."""
        saved = int((1 - (WITH_GELU if with_gelu else COMPILED_GRAPH)) * self.further)
        sizes = {name: getattr(self, name) - saved for name in ("kept", "peak", "further")}
        return replace(self, **sizes)


@dataclass(frozen=True)
class Sample:
    """A pair's inputs: its first one (image) and its text, by tower, without values that count.

    texts: the number of texts of a pair, its own and its hard negatives.
    """

    inputs: Mapping[Tower, Tensor]
    texts: int = 1

    @property
    def nbytes(self) -> int:
        """Bytes of a pair."""
        return self.bytes_of("image") + self.bytes_of("text")

    def bytes_of(self, tower: Tower) -> int:
        """Bytes of a pair's inputs of a tower."""
        return self.inputs[tower].nbytes * (self.texts if tower == "text" else 1)

    def cut(self, widths: Mapping[Tower, int]) -> Sample:
        """The sample with texts of so many tokens for these towers."""
        cut = {tower: tensor[: widths.get(tower)] for tower, tensor in self.inputs.items()}
        return replace(self, inputs=cut)

    def empty(self, pairs: int, place: torch.device) -> list[Tensor]:
        """Inputs of each tower for so many pairs, uninitialised."""
        rows = {"image": pairs, "text": pairs * self.texts}
        return [
            torch.empty((rows[tower], *one.shape), dtype=one.dtype, device=place)
            for tower, one in self.inputs.items()
        ]


def sample_of(towers: Towers, texts: int = 1) -> Sample:
    """A pair as the towers' transform and tokenizer return it."""
    picture: Any = "a" if towers.first == "text" else Image.new("RGB", (64, 64))
    with torch.random.fork_rng(devices=[]):  # keep the run's random state
        image = towers.train_transform(picture)
    return Sample({"image": image, "text": towers.tokenizer(["a"])[0]}, texts)


def measure(
    module: nn.Module, sample: Sample, size: int, device: str, precision: str
) -> MicroBatch:
    """Count the memory and work of `size` pairs; nothing is computed, and no device is needed.

    torch runs no backward pass on fake CUDA tensors without a GPU, and on any machine none with
    checkpoints. So the graph is counted for CUDA, and the backward pass is assumed to add what it
    adds on the CPU. torch 2.9 has no graph for an absent device; with it all is counted on the CPU.
    """
    host = _measure(module, sample, size, "cpu", precision)
    absent = not torch.cuda.is_available() and torch.__version__ < "2.10"  # it ends the process
    if device == "cpu" or absent:
        return host
    try:
        with mock.patch.object(F, "scaled_dot_product_attention", _fused_attention):
            there = _measure(module, sample, size, "cuda", precision)
    except (RuntimeError, AssertionError):  # it uses the device itself, as checkpointing does
        return host
    peak = max(there.peak, there.kept + host.peak - host.kept)
    return replace(there, peak=peak, backward=host.backward)


def _measure(
    module: nn.Module, sample: Sample, size: int, device: str, precision: str
) -> MicroBatch:
    place, locked = torch.device(device), locked_towers(module)
    with counted() as counter, _autocast(device, precision):
        named = [*module.named_parameters(), *module.named_buffers()]
        weights = {
            n: torch.empty_like(t, device=place, requires_grad=t.requires_grad) for n, t in named
        }
        for weight in weights.values():
            if weight.requires_grad:  # gradients exist in all micro-batches after the first
                weight.grad = torch.zeros_like(weight)

        def encode(inputs: list[Tensor], leave_out: Collection[str] = ()) -> list[Tensor]:
            towers = zip(sample.inputs, inputs, strict=True)
            parts = (None if tower in leave_out else tensor for tower, tensor in towers)
            outputs = functional_call(module, weights, tuple(parts))
            return [value for value in outputs.values() if value is not None]

        inputs = sample.empty(size, place)
        before = counter.start()
        with torch.no_grad():
            encode(inputs)
        forward, encoded = counter.peak - before, counter.work
        torch.clear_autocast_cache()
        before = counter.start()
        outputs = encode(inputs, locked)
        kept, peak, recorded = counter.live - before, counter.peak, counter.work
        another = encode(sample.empty(size, place), locked)  # a graph may keep its inputs
        further = counter.live - before - kept
        del another
        counter.start()
        if device == "cpu":
            wanted = [tensor for tensor in outputs if tensor.requires_grad]
            torch.autograd.backward(wanted, [torch.ones_like(tensor) for tensor in wanted])
        most = max(peak, counter.peak) - before
        return MicroBatch(forward, kept, most, further, encoded, recorded, counter.work)


def _fused_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **_: Any,
) -> Tensor:
    """Attention as on a GPU: without one torch would form the full matrix of weights."""
    if torch.is_autocast_enabled("cuda"):
        dtype = torch.get_autocast_dtype("cuda")
        query, key, value = (tensor.to(dtype) for tensor in (query, key, value))
    bias = None if attn_mask is None else attn_mask.to(query.dtype)
    return torch_internals.fused_attention(query, key, value, bias, True, dropout_p, is_causal)[0]


@contextmanager
def _autocast(device: str, precision: str) -> Iterator[None]:
    """Autocast, also for a device that does not exist, for which `torch.autocast` stays off."""
    dtype = AUTOCAST.get(precision)
    with torch.autocast(device, dtype, enabled=False):  # restores what was set
        torch.set_autocast_enabled(device, dtype is not None)
        yield


# --- the counter ----------------------------------------------------------------------------------


@contextmanager
def counted() -> Iterator[Counter]:
    """Within this context new tensors are fake, and operations on them are counted."""
    with fake_tensor_mode(allow_non_fake_inputs=True), Counter() as counter:
        yield counter


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
        self.work = Work(*map(operator.add, self.work, done))
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
        if name.endswith("mm") or "attention" in name:
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


def tensors_in(results: Any) -> list[Tensor]:
    """The tensors among an operation's results or arguments."""
    return [leaf for leaf in tree_leaves(results) if isinstance(leaf, Tensor)]
