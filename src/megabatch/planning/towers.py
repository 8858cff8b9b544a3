"""Memory of one micro-batch in the towers, counted with fake tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn
from torch.func import functional_call

from megabatch import torch_internals
from megabatch.models import Towers
from megabatch.models.towers import Tower, locked_towers
from megabatch.planning.counter import Work, counted, fake_copies

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
#: What compiled blocks keep for the backward pass, as a share of what others keep. By torch's own
#: partition of both passes it is 0.90 to 0.95 for the transformers of CLIP and for glyphs.
COMPILED_GRAPH = 0.92


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
        feature_dtype: of the features.
    """

    forward: int
    kept: int
    peak: int
    further: int
    encode: Work
    record: Work
    backward: Work
    feature_dtype: torch.dtype

    def plus(self, other: MicroBatch, share: float = 1) -> MicroBatch:
        """The sums with a share of another one's numbers."""
        made: dict[str, Any] = {}
        for name in ("forward", "kept", "peak", "further"):
            made[name] = int(getattr(self, name) + share * getattr(other, name))
        for name in ("encode", "record", "backward"):
            made[name] = getattr(self, name).plus(getattr(other, name), share)
        return replace(self, **made)

    def compiled(self) -> MicroBatch:
        """With blocks that torch.compile makes; see `COMPILED_GRAPH`."""
        saved = int((1 - COMPILED_GRAPH) * self.further)
        sizes = {name: getattr(self, name) - saved for name in ("kept", "peak", "further")}
        return replace(self, **sizes)


@dataclass(frozen=True)
class Sample:
    """Shapes and dtypes of a pair's first input (image) and its text.

    texts: the number of texts of a pair, its own and its hard negatives.
    """

    first: tuple[tuple[int, ...], torch.dtype]
    text: tuple[tuple[int, ...], torch.dtype]
    texts: int = 1

    @property
    def nbytes(self) -> int:
        """Bytes of a pair."""
        return self.first_bytes + self.text_bytes

    @property
    def first_bytes(self) -> int:
        """Bytes of a first input (image)."""
        return _size(*self.first)

    @property
    def text_bytes(self) -> int:
        """Bytes of a pair's texts."""
        return _size(*self.text) * self.texts

    def context(self, tower: Tower) -> int:
        """Tokens of a tower's text."""
        return (self.first if tower == "image" else self.text)[0][0]

    def with_widths(self, widths: Mapping[Tower, int]) -> Sample:
        """The sample with texts of so many tokens for these towers."""

        def cut(tower: Tower, one: tuple[tuple[int, ...], torch.dtype]) -> Any:
            (context, *more), dtype = one
            return (widths.get(tower, context), *more), dtype

        return replace(self, first=cut("image", self.first), text=cut("text", self.text))

    def empty(self, pairs: int, place: torch.device) -> list[Tensor]:
        """Inputs of each tower for so many pairs, uninitialised."""
        rows = zip((pairs, pairs * self.texts), (self.first, self.text), strict=True)
        return [torch.empty((n, *shape), dtype=dtype, device=place) for n, (shape, dtype) in rows]


def _size(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return torch.Size(shape).numel() * dtype.itemsize


def sample_of(towers: Towers) -> Sample:
    """A pair as the towers' transform and tokenizer return it."""
    picture: Any = "a" if towers.first == "text" else Image.new("RGB", (64, 64))
    with torch.random.fork_rng(devices=[]):  # keep the run's random state
        image = towers.train_transform(picture)
    text = towers.tokenizer(["a"])[0]
    return Sample((tuple(image.shape), image.dtype), (tuple(text.shape), text.dtype))


def measure(
    module: nn.Module, sample: Sample, size: int, device: str, precision: str
) -> MicroBatch:
    """Count the memory and work of `size` pairs; nothing is computed, and no device is needed.

    Without a CUDA device torch cannot run a backward pass on fake CUDA tensors, nor with one if
    activations are checkpointed. Then the graph is counted for CUDA, and the backward pass is
    assumed to add what it adds on the CPU. torch 2.9 has no graph for an absent device; with it all
    is counted on the CPU.
    """
    if device == "cuda" and torch.cuda.is_available():
        # Checkpointing computes again outside, where the weights are the module's own.
        with contextlib.suppress(RuntimeError):
            return _measure(module, sample, size, device, precision)
    host = _measure(module, sample, size, "cpu", precision)
    if device == "cpu" or torch.__version__ < "2.10":  # as versions; it would end the process
        return host
    try:
        with mock.patch.object(F, "scaled_dot_product_attention", _fused_attention):
            there = _measure(module, sample, size, "cuda", precision, backward=False)
    except (RuntimeError, AssertionError):  # it uses the device itself, as checkpointing does
        return host
    peak = max(there.peak, there.kept + host.peak - host.kept)
    return replace(there, peak=peak, backward=host.backward)


def _measure(
    module: nn.Module,
    sample: Sample,
    size: int,
    device: str,
    precision: str,
    backward: bool = True,
) -> MicroBatch:
    place, locked = torch.device(device), locked_towers(module)
    with counted() as counter, _autocast(device, precision):
        weights = fake_copies(module, place)
        for weight in weights.values():
            if weight.requires_grad:  # gradients exist in all micro-batches after the first
                weight.grad = torch.zeros_like(weight)

        def encode(inputs: list[Tensor], leave_out: Collection[str] = ()) -> list[Tensor]:
            towers = zip(("image", "text"), inputs, strict=True)
            parts = (None if tower in leave_out else tensor for tower, tensor in towers)
            outputs = functional_call(module, weights, tuple(parts))
            return [value for value in outputs.values() if value is not None]

        inputs = sample.empty(size, place)
        before = counter.start()
        with torch.no_grad():
            features = encode(inputs)
        dtype = next(t.dtype for t in features if t.ndim == 2)
        forward, encoded = counter.peak - before, counter.work
        del features
        torch.clear_autocast_cache()
        before = counter.start()
        outputs = encode(inputs, locked)
        kept, peak, recorded = counter.live - before, counter.peak, counter.work
        another = encode(sample.empty(size, place), locked)  # a graph may keep its inputs
        further = counter.live - before - kept
        del another
        counter.start()
        if backward:
            wanted = [tensor for tensor in outputs if tensor.requires_grad]
            torch.autograd.backward(wanted, [torch.ones_like(tensor) for tensor in wanted])
        most = max(peak, counter.peak) - before
        return MicroBatch(forward, kept, most, further, encoded, recorded, counter.work, dtype)


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
    made: tuple[Tensor, ...]
    if attn_mask is None:
        made = torch_internals.flash_attention(query, key, value, dropout_p, is_causal)
    else:
        bias = attn_mask.to(query.dtype)
        made = torch_internals.masked_attention(query, key, value, bias, True, dropout_p, is_causal)
    return made[0]


@contextlib.contextmanager
def _autocast(device: str, precision: str) -> Iterator[None]:
    """Autocast, also for a device that does not exist, which `torch.autocast` ignores."""
    if precision not in AUTOCAST:
        yield
        return
    before = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    torch.set_autocast_enabled(device, True)
    torch.set_autocast_dtype(device, AUTOCAST[precision])
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()
        torch.set_autocast_enabled(device, before[0])
        torch.set_autocast_dtype(device, before[1])
