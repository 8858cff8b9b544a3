"""Memory and work of one micro-batch in the towers, counted with fake tensors."""

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
from megabatch.models.layers import Tower, locked_towers
from megabatch.planning.counter import Work, counted, fake_copies
from megabatch.planning.memory import AUTOCAST

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

    def compiled(self) -> MicroBatch:
        """With blocks that torch.compile makes; see `COMPILED_GRAPH`."""
        saved = int((1 - COMPILED_GRAPH) * self.further)
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
            towers = zip(sample.inputs, inputs, strict=True)
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
