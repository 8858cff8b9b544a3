"""One encoder's two passes over the micro-batches of a batch."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from megabatch.gradient_cache.batches import tensors_in
from megabatch.gradient_cache.feed import Feed, Parts
from megabatch.gradient_cache.frozen import FrozenParts
from megabatch.gradient_cache.room import allocated
from megabatch.gradient_cache.state import (
    cuda_devices,
    get_random_state,
    gradient_wrappers,
    keep_running_statistics,
    modules_in,
    set_random_state,
    without_synchronisation,
)

Outputs = dict[Any, Tensor | None]  # by position (int) or keyword (str)


class Encoding:
    """An encoder with the batches that it takes in one step, and what is cached between passes.

    After `forward`, `cached` holds the outputs of the whole batch as leaves of the loss's graph,
    and `per_sample` the names of those that have a row per sample. After `backward`, `activations`
    is the most that a micro-batch's graph took of the GPUs' memory, in bytes. `graph` holds the
    outputs of the only micro-batch where its graph was kept.
    """

    def __init__(
        self, name: str, encoder: Any, feed: Feed, feature_dtype: torch.dtype | None = None
    ) -> None:
        """Look into the encoder; `name` is for messages."""
        self.name = name
        self.encoder = encoder
        self.feed = feed
        self.feature_dtype = feature_dtype
        self.modules = modules_in(encoder)
        self.wrappers = gradient_wrappers(self.modules)
        parameters = (module.parameters(recurse=False) for module in self.modules)
        self.devices = cuda_devices(tensors_in(feed.batches), *parameters)
        if feed.device is not None and feed.device.type == "cuda":
            self.devices.add(feed.device)
        self.requires_grad = isinstance(encoder, nn.Module) and any(
            parameter.requires_grad for parameter in encoder.parameters()
        )
        self.random_states: list[dict[torch.device, Tensor]] = []
        self.cached: Outputs = {}
        self.gradients: Outputs = {}
        self.activations = 0
        self.graph: Outputs | None = None
        self.per_sample: set[Any] = set()
        self.by_keyword = False

    @functools.cached_property
    def frozen(self) -> FrozenParts:
        """What need not run in the second pass; not looked for where there is none."""
        return FrozenParts(self.modules, self.devices)

    def forward(self, micro_batches: list[slice]) -> None:
        """Encode all micro-batches without a graph, remembering the random state before each."""
        pieces = []
        feed = contextlib.closing(self.feed(micro_batches))
        with without_synchronisation(self.wrappers), feed as fed:
            for i, (rows, parts) in enumerate(zip(micro_batches, fed, strict=True)):
                pieces.append(self._forward_one(i, rows, parts))
                del parts
        if any(piece.keys() != pieces[0].keys() for piece in pieces):
            raise ValueError(f"encoders: {self.name} gave different outputs for two micro-batches")
        for key in pieces[0]:
            self._cache(key, [piece[key] for piece in pieces], micro_batches)

    def forward_once(self, micro_batch: slice) -> None:
        """Encode the only micro-batch, keeping its graph for `backward`.

        Wrappers prepare here for the gradients that they will reduce over ranks.
        """
        before = allocated(self.devices)
        with contextlib.closing(self.feed([micro_batch])) as fed:
            (parts,) = fed
            with self._statistics_of(micro_batch):
                self.graph = self._encode(parts)
        self.activations = allocated(self.devices) - before
        tensors = [output for output in self.graph.values() if output is not None]
        self.requires_grad |= any(output.requires_grad for output in tensors)
        for key, output in self.graph.items():
            self._cache(key, [None if output is None else self._kept(output)], [micro_batch])

    def large_gradients(self) -> list[Tensor]:
        """The gradients of outputs that grow with the batch."""
        outputs = (self.cached[key] for key in self.per_sample)
        return [t.grad for t in outputs if t is not None and t.grad is not None]

    def take_gradients(self, keep: Callable[[Tensor], Tensor]) -> None:
        """Let go of the outputs and keep what the loss sent to them, where `keep` puts it."""
        outputs, self.cached = self.cached, {}
        self.gradients = {
            key: None if tensor is None or tensor.grad is None else tensor.grad
            for key, tensor in outputs.items()
        }
        del outputs
        for key in self.per_sample:
            gradient = self.gradients[key]
            self.gradients[key] = None if gradient is None else keep(gradient)

    def has_gradients(self) -> bool:
        """Whether the loss sent a gradient to any output, so that `backward` has work to do."""
        return any(gradient is not None for gradient in self.gradients.values())

    def backward_once(self, micro_batch: slice) -> None:
        """Send the gradients through the graph of the only micro-batch, which is gone then."""
        graph, self.graph = self.graph, None
        assert graph is not None
        if self.wrappers and not self.has_gradients():
            # They wait for each of their gradients, and would refuse the next step.
            self.gradients = {
                key: None if output is None else torch.zeros_like(output)
                for key, output in graph.items()
            }
        self._send(graph, micro_batch, last=True)
        self.gradients = {}

    def backward(self, micro_batches: list[slice], synchronise: bool) -> None:
        """Encode all micro-batches again, with a graph, and send the cached gradients through it.

        With `synchronise` DDP and FSDP2 reduce the gradients over ranks in the last micro-batch.
        """
        feed = contextlib.closing(self.feed(micro_batches))
        with keep_running_statistics(self.modules), feed as fed:
            for i, (rows, parts) in enumerate(zip(micro_batches, fed, strict=True)):
                last = i == len(micro_batches) - 1
                set_random_state(self.random_states[i])
                with without_synchronisation([] if last and synchronise else self.wrappers):
                    self._backward_one(i, rows, parts, last)
                del parts
        self.gradients = {}

    def arguments(self) -> tuple[list[Tensor | None], dict[str, Tensor]]:
        """The cached outputs as positional and keyword arguments of the loss."""
        if self.by_keyword:
            return [], {key: t for key, t in self.cached.items() if t is not None}
        return list(self.cached.values()), {}

    def single_output(self) -> Tensor:
        """The cached output of an encoder that has only one."""
        output = self.cached.get(0)
        if len(self.cached) != 1 or output is None:
            got = ", ".join(type(value).__name__ for value in self.cached.values())
            raise TypeError(
                "encoders: with several encoders each must return one tensor, "
                f"but {self.name} returned ({got})"
            )
        return output

    # The two functions below are functions so that a micro-batch's graph is gone when they return.

    def _forward_one(self, i: int, rows: slice, parts: Parts) -> Outputs:
        self.random_states.append(get_random_state(self.devices))
        # Whether a frozen module, or a callable that is no module, leads back to a parameter is
        # seen from its outputs; a graph is recorded until one does, that is none or only one.
        graph = not self.requires_grad or (i == 0 and bool(self.frozen))
        first_pass = self.frozen.first_pass(i)
        with self._statistics_of(rows), torch.set_grad_enabled(graph), first_pass:
            outputs = self._encode(parts)
        tensors = [output for output in outputs.values() if output is not None]
        self.requires_grad |= any(output.requires_grad for output in tensors)
        return {key: None if out is None else self._kept(out) for key, out in outputs.items()}

    def _statistics_of(self, rows: slice) -> AbstractContextManager[None]:
        """What an idle micro-batch has in it is nobody's data."""
        idle = rows.start == rows.stop
        return keep_running_statistics(self.modules) if idle else contextlib.nullcontext()

    def _kept(self, output: Tensor) -> Tensor:
        output = output.detach()
        narrow = self.feature_dtype is not None and output.ndim > 1 and output.is_floating_point()
        return output.to(self.feature_dtype) if narrow else output

    def _backward_one(self, i: int, rows: slice, parts: Parts, last: bool) -> None:
        before = allocated(self.devices)
        with self.frozen.second_pass(i):
            encoded = self._encode(parts)
        self.activations = max(self.activations, allocated(self.devices) - before)
        self._send(encoded, rows, last)

    def _send(self, encoded: Outputs, rows: slice, last: bool) -> None:
        """Send the gradients of one micro-batch's outputs through its graph."""
        outputs, upstream = [], []
        for key, output in encoded.items():
            gradient = self.gradients[key]
            if output is None or gradient is None or not output.requires_grad:
                continue
            if key in self.per_sample:
                outputs.append(output[: rows.stop - rows.start])  # of an idle micro-batch: no row
                # From the host it is on its way while the graph's first steps are prepared.
                upstream.append(gradient[rows].to(output, non_blocking=True))
            else:  # once; but every micro-batch reaches the same parameters, as DDP expects
                outputs.append(output)
                upstream.append(gradient if last else torch.zeros_like(gradient))
        if outputs:
            torch.autograd.backward(outputs, upstream)

    def _encode(self, parts: Parts) -> Outputs:
        output = self.encoder(*parts)
        if isinstance(output, Tensor):
            return {0: output}
        self.by_keyword = isinstance(output, Mapping)
        if not isinstance(output, (Mapping, tuple, list)):
            raise TypeError(
                f"encoders: expected {self.name} to return a tensor, or a tuple or mapping of "
                f"tensors, got {type(output).__name__}"
            )
        outputs = dict(output) if isinstance(output, Mapping) else dict(enumerate(output))
        for key, value in outputs.items():
            if value is not None and not isinstance(value, Tensor):
                raise TypeError(
                    f"encoders: output {key!r} of {self.name} is of type {type(value).__name__}, "
                    "expected a tensor or None"
                )
        return outputs

    def _cache(self, key: Any, pieces: list[Tensor | None], micro_batches: list[slice]) -> None:
        """Put one output's micro-batches together, as a leaf that collects the loss's gradient."""
        name = f"encoders: output {key!r} of {self.name}"
        tensors = [piece for piece in pieces if piece is not None]
        if not tensors:
            self.cached[key] = None
            return
        if len(tensors) < len(pieces):
            raise ValueError(f"{name} is None in some micro-batches only")
        kept = [rows.stop - rows.start for rows in micro_batches]
        encoded = [self.feed.encoded(rows) for rows in micro_batches]
        shapes = [tuple(tensor.shape) for tensor in tensors]
        if shapes[0] in ((), (1,)) and len(set(shapes)) == 1:
            if not _all_equal(tensors):
                raise ValueError(
                    f"{name} has shape {shapes[0]}, as a value shared by all samples, but differs "
                    "between micro-batches (if it is per sample: return shape (rows, 1), or use "
                    "micro-batches of at least 2 rows)"
                )
            whole = tensors[0]
        elif shapes == [(n, *shapes[0][1:]) for n in encoded]:
            self.per_sample.add(key)
            whole = torch.cat([tensor[:n] for tensor, n in zip(tensors, kept, strict=True)])
        else:
            raise ValueError(
                f"{name} has shape {_either(shapes)} in micro-batches of {_either(encoded)} rows; "
                "expected a row per sample, or shape () or (1,)"
            )
        differentiable = whole.is_floating_point() or whole.is_complex()
        self.cached[key] = whole.requires_grad_(self.requires_grad and differentiable)


def _all_equal(tensors: list[Tensor]) -> bool:
    """Whether all are the same, NaN equal to NaN: the one value that a step reads back."""
    if len(tensors) == 1:
        return True
    values, first = torch.stack(tensors), tensors[0]
    both_nan = (values != values) & (first != first)
    return bool(((values == first) | both_nan).all())


def _either(values: list[Any]) -> str:
    return " or ".join(str(value) for value in dict.fromkeys(values))
