"""One encoder's two passes over a batch's micro-batches."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from megabatch.gradient_cache.arguments import OutputForm, Outputs, assembled, call
from megabatch.gradient_cache.autograd import GradientSums, add_to_grad, reached_from
from megabatch.gradient_cache.by_length import MicroBatch
from megabatch.gradient_cache.checks import PassesCheck
from megabatch.gradient_cache.feed import Feed, Parts
from megabatch.gradient_cache.frozen import FrozenParts
from megabatch.gradient_cache.offload import allocated, to_host
from megabatch.gradient_cache.state import (
    ForwardState,
    Watched,
    cuda_devices,
    keep_running_statistics,
    possible_state,
)
from megabatch.gradient_cache.wrappers import (
    Wrappers,
    check_ddp_around,
    modules_in,
    parameters_in,
    reduces_by_itself,
)
from megabatch.torch_internals import ddp_around

#: An earlier micro-batch's backward pass changed weights, where hooks see each one's gradient.
_BY_HOOK = (
    "during the backward pass, before its last micro-batch",
    "a hook on gradients steps an optimizer. Here hooks are called for each micro-batch (with "
    "DistributedDataParallel, a reentrant checkpoint, or a parameter that is out of sight, inside "
    "an encoder): call optimizer.step() after loss.backward() instead. Weights have changed: start "
    "anew",
)


class Encoding:
    """An encoder with its batches in one step, and the state between the passes.

    The last `kept` micro-batches are encoded once: `forward` records their graphs, which wait in
    `graphs` for the backward pass. With `once` the only micro-batch is.

    Attributes:
        inputs: the tensors that get gradients: parameters, and batches that require a gradient.
        direct: whether gradients go to `.grad` in each micro-batch, by `.backward()`, as DDP,
            FSDP2, reentrant checkpoints and parameters that are not visible from outside need it.
        cached: outputs of the whole batch, leaves of the loss's graph, and then their `gradients`.
        per_sample: the keys of those that have a row per sample.
        activations: bytes of each micro-batch's graph on GPUs, by the number of the micro-batch.
    """

    def __init__(
        self,
        encoder: Any,
        feed: Feed,
        form: OutputForm,
        feature_dtype: torch.dtype | None,
        check: PassesCheck | None,
    ) -> None:
        """Find the encoder's modules, parameters and wrappers."""
        self.name = feed.name  # for messages
        self.encoder, self.feed, self.form = encoder, feed, form
        self.modules = modules_in(encoder)
        self.wrappers = Wrappers(self.modules)
        self.parameters = parameters_in(encoder)
        tensors = [*self.parameters.values(), *feed.tensors]
        self.inputs = [tensor for tensor in tensors if tensor.requires_grad]
        self.devices = cuda_devices(tensors)
        if feed.device is not None and feed.device.type == "cuda":
            self.devices.add(feed.device)
        trained = any(parameter.requires_grad for parameter in self.parameters.values())
        self.requires_grad = isinstance(encoder, nn.Module) and trained
        self._fsdp1 = reduces_by_itself(self.modules)
        self.direct = bool(self.wrappers) or self._fsdp1
        self._hidden_parameters = False
        self._ddp_around = ddp_around()
        self._watched: dict[int, Watched] = {}
        self._watch((f"parameter {name}", p) for name, p in self.parameters.items())
        self._batches = [Watched(k, t) for k, t in feed.watched.items() if not t.is_inference()]
        self._buffers = possible_state(self.modules)
        self._states: list[ForwardState] = []  # before each micro-batch
        self.micro_batches: list[MicroBatch] = []
        self.kept, self.once = 0, False
        self.graphs: list[Outputs] = []
        self.cached: Outputs = {}
        self.gradients: Outputs = {}
        self.per_sample: set[Any] = set()
        self.activations: dict[int, int] = {}
        self._feature_dtype = feature_dtype
        self._check = check  # compares features of both passes
        self._first: Outputs = {}  # of micro-batch 0, to be compared

    @functools.cached_property
    def frozen(self) -> FrozenParts:
        """Parts that need not run in the second pass; searched for only if there is one."""
        return FrozenParts(self.modules, self.devices)

    def keep(self, most: int) -> None:
        """Choose the graphs to keep for the second pass: those of the last `most` micro-batches.

        With wrappers the micro-batch that synchronises is encoded again, after all other backward
        passes, as DDP prepares its reduction in a forward pass. FSDP1 reduces only the gradients of
        its latest forward pass: it keeps none.
        """
        none = self.once or self._fsdp1
        possible = 0 if none else len(self.micro_batches) - bool(self.wrappers)
        self.kept = min(most, possible)

    def release(self) -> None:
        """Free the graphs that were kept, and features to be compared."""
        self.graphs, self._first = [], {}

    def forward(self) -> None:
        """Encode all micro-batches: with a graph those to be kept, without one the others.

        Before each of them the random state is saved for the second pass, unless autograd is off.
        """
        pieces = []
        if self.once:
            self.wrappers.prepare()
        feed = contextlib.closing(self.feed(self.micro_batches))
        with self.wrappers.synchronising(self.once), feed as fed:
            for i, (micro_batch, parts) in enumerate(zip(self.micro_batches, fed, strict=True)):
                encode = self._forward_one if torch.is_grad_enabled() else self._evaluate_one
                pieces.append(encode(i, micro_batch, parts))
                del parts
        if self._check is not None and not self.once:
            self._first = pieces[0]
        if any(piece.keys() != pieces[0].keys() for piece in pieces):
            raise ValueError(f"encoders: {self.name} gave different outputs for two micro-batches")
        for key in pieces[0]:
            self._cache(key, [piece[key] for piece in pieces])
        self.feed.check_outputs(self.per_sample)

    def state(self) -> ForwardState:
        """The current state that the encoder's forward passes change."""
        return ForwardState(self.devices, self._buffers)

    def check_unchanged(self, by: str, advice: str, *, batches: bool) -> None:
        """Raise a RuntimeError if a parameter, or one of the batches, was changed in this step."""
        for watched in (*self._watched.values(), *(self._batches if batches else ())):
            if watched.changed():
                raise RuntimeError(
                    f"GradientCache: {watched.name} of {self.name} was changed {by}: {advice}"
                )

    def trained(self) -> list[Tensor]:
        """The cached outputs that get a gradient."""
        return [t for t in self.cached.values() if t is not None and t.requires_grad]

    def take_gradients(self, found: list[Tensor | None]) -> None:
        """Replace the outputs by their gradients, taken from the end of those that were found."""
        for key, tensor in reversed(self.cached.items()):
            gradient = found.pop() if tensor is not None and tensor.requires_grad else None
            _, batch = self.feed.sorted_by(key)
            if gradient is not None and batch is not None and key in self.per_sample:
                gradient = batch.in_own_order(gradient)
            self.gradients[key] = gradient
        if self.once and self.wrappers and not self.has_gradients():
            # They wait for all of their gradients, and would refuse the next step.
            self.gradients = {
                k: None if t is None else torch.zeros_like(t) for k, t in self.cached.items()
            }
        self.cached = {}

    def move_gradients_to_host(self) -> None:
        """Let the gradients of per-sample outputs wait on the host."""
        for key in self.per_sample:
            gradient = self.gradients[key]
            self.gradients[key] = None if gradient is None else to_host(gradient)

    def has_gradients(self) -> bool:
        """Whether any output got a gradient, so that a backward pass has work to do."""
        return any(gradient is not None for gradient in self.gradients.values())

    def backward_kept(self, sums: GradientSums) -> None:
        """Backpropagate through the graphs that were kept, and free one after the other."""
        if not self.has_gradients():
            self.release()
        with self.wrappers.synchronising(False):
            for micro_batch in self.micro_batches[len(self.micro_batches) - len(self.graphs) :]:
                last = self.kept == len(self.micro_batches) and len(self.graphs) == 1
                self._backpropagate(self.graphs.pop(0), micro_batch, last, sums)

    def backward(self, sums: GradientSums, *, synchronise: bool) -> None:
        """Encode micro-batches again, with a graph, and backpropagate the cached gradients.

        With `synchronise`, DDP and FSDP2 do in the last micro-batch what they were set to do when
        the step was called: reduce the gradients over ranks, unless under `no_sync`.
        """
        if self.once and self.wrappers.are_prepared():
            with self.wrappers.synchronising(True):
                self._backpropagate(self.graphs.pop(), self.micro_batches[0], True, sums)
            return
        self.graphs = []  # with `once`, for the sum of two losses: DDP is prepared for the other
        micro_batches = self.micro_batches[: len(self.micro_batches) - self.kept]
        self.wrappers.prepare()
        feed = contextlib.closing(self.feed(micro_batches))
        with keep_running_statistics(self.modules), feed as fed:
            for i, (micro_batch, parts) in enumerate(zip(micro_batches, fed, strict=True)):
                last = i == len(micro_batches) - 1
                self._states[i].restore()
                with self.wrappers.synchronising(last and synchronise):
                    self._backward_one(i, micro_batch, parts, last, sums)
                del parts
        self.gradients = {}

    # These are functions so that a micro-batch's graph is freed when they return.

    def _evaluate_one(self, i: int, micro_batch: MicroBatch, parts: Parts) -> Outputs:
        with self._statistics_of(micro_batch):
            return self._without_graph(self._encode(parts))

    def _forward_one(self, i: int, micro_batch: MicroBatch, parts: Parts) -> Outputs:
        encoded_twice = len(self.micro_batches) - self.kept
        keep = self.once or i >= encoded_twice
        if i == encoded_twice:
            # Autocast caches casts of weights; those made without a graph pass no gradient on.
            torch.clear_autocast_cache()
        # Only the outputs of a function show whether it depends on a parameter: record empty graphs
        # until one does.
        graph = keep or not self.requires_grad or (i == 0 and bool(self.frozen))
        state = self.state()
        self._states.append(state)
        before = allocated(self.devices)
        frozen = contextlib.nullcontext() if self.once else self.frozen.recorded()
        with self._statistics_of(micro_batch), torch.set_grad_enabled(graph), frozen:
            outputs = self._encode(parts)
        if i == 0:
            self._buffers = state.keep_updated(compare=self._check is not None)
        if micro_batch.idle:  # its rows are no data, and leave no trace
            state.restore_buffers()
        if graph:
            self._inspect_graph(outputs)
        # Hidden leaves are FSDP2's whole parameters, or their wrapper may be hidden as well, which
        # would synchronise only in the first of several backward passes.
        found = self.requires_grad and (bool(self.wrappers) or not self._hidden_parameters)
        if keep and (self.once or found):
            self.graphs.append(outputs)
            self.activations[i] = allocated(self.devices) - before
        elif keep:
            self.kept, self.graphs = 0, []
        return self._without_graph(outputs)

    def _inspect_graph(self, outputs: Outputs) -> None:
        """Find out from a graph which leaves the outputs depend on."""
        tensors = [tensor for tensor in outputs.values() if tensor is not None]
        if not any(tensor.requires_grad for tensor in tensors):
            return
        self.requires_grad = True
        known = {id(tensor) for tensor in self.inputs}
        leaves, reentrant = reached_from(tensors, self._graph_inputs())
        # Other leaves are of one micro-batch: PEFT lets embeddings' outputs require a gradient.
        parameters = [leaf for leaf in leaves.values() if isinstance(leaf, nn.Parameter)]
        hidden = [parameter for parameter in parameters if id(parameter) not in known]
        self.inputs += hidden
        self._hidden_parameters |= bool(hidden)
        self.direct |= bool(hidden) or reentrant

    def _graph_inputs(self) -> list[Tensor]:
        """Batches that are results of another graph."""
        return [tensor for tensor in self.inputs if not tensor.is_leaf]

    def _statistics_of(self, micro_batch: MicroBatch) -> contextlib.AbstractContextManager[None]:
        """Keep an idle micro-batch's rows out of running statistics."""
        return keep_running_statistics(self.modules if micro_batch.idle else [])

    def _without_graph(self, outputs: Outputs) -> Outputs:
        cached, dtype = dict(outputs), self._feature_dtype
        for key, output in outputs.items():
            if output is not None:
                narrow = dtype is not None and output.ndim > 1 and output.is_floating_point()
                cached[key] = output.detach().to(dtype if narrow else output.dtype)
        return cached

    def _backward_one(
        self, i: int, micro_batch: MicroBatch, parts: Parts, last: bool, sums: GradientSums
    ) -> None:
        before = allocated(self.devices)
        with self.frozen.replayed(i):
            encoded = self._encode(parts)
        self.activations[i] = allocated(self.devices) - before
        if i == 0 and self._check is not None:
            self._check.compare(self.name, self._first, self._without_graph(encoded))
            self._first = {}
        self._backpropagate(encoded, micro_batch, last, sums)

    def _backpropagate(
        self, encoded: Outputs, micro_batch: MicroBatch, last: bool, sums: GradientSums
    ) -> None:
        """Backpropagate the gradients of one micro-batch's outputs."""
        outputs, upstream = [], []
        for key, output in encoded.items():
            gradient = self.gradients[key]
            if output is None or gradient is None or not output.requires_grad:
                continue
            if key in self.per_sample:
                rows = micro_batch.of(self.feed.sorted_by(key)[0])
                outputs.append(output[: rows.stop - rows.start])  # no row if it is idle
                # From the host it is copied while the backward pass is being launched.
                upstream.append(gradient[rows].to(output, non_blocking=True))
            else:  # counted once, but every micro-batch reaches the same parameters, for DDP
                outputs.append(output)
                upstream.append(gradient if last else torch.zeros_like(gradient))
        if not outputs:
            return
        graph_inputs = self._graph_inputs()
        leaves, reentrant = reached_from(outputs, graph_inputs)
        known = [leaf for leaf in leaves.values() if leaf in sums]
        others = [leaf for leaf in leaves.values() if leaf not in sums]
        hidden = [leaf for leaf in others if isinstance(leaf, nn.Parameter)]
        watched = leaves.values() if self.direct else hidden
        parameters = [leaf for leaf in watched if isinstance(leaf, nn.Parameter)]
        self._watch((f"a parameter {(*p.shape,)}, out of sight,", p) for p in parameters)
        self.check_unchanged(*_BY_HOOK, batches=False)
        if self.direct or reentrant or hidden:
            if len(self.micro_batches) > 1 and not self.wrappers:
                check_ddp_around(self.name, self._ddp_around)
            if last and not reentrant:
                self.wrappers.check_all_used(self.name, leaves)
            torch.autograd.backward(outputs, upstream)
            return
        gradients = sums.add_from(outputs, upstream, [*known, *graph_inputs], others)
        for leaf, gradient in zip(others, gradients, strict=True):
            add_to_grad(leaf, gradient)

    def _watch(self, parameters: Iterable[tuple[str, Tensor]]) -> None:
        for name, parameter in parameters:
            whole = self.wrappers.shards and not hasattr(parameter, "device_mesh")
            if not (whole or parameter.is_inference() or id(parameter) in self._watched):
                self._watched[id(parameter)] = Watched(name, parameter)

    def _encode(self, parts: Parts) -> Outputs:
        *positional, named = parts
        return self.form.read(call(self.name, self.encoder, positional, named))

    def _cache(self, key: Any, pieces: list[Tensor | None]) -> None:
        """Assemble one output from its micro-batches, as a leaf for the loss's gradient."""
        name, batch = self.feed.sorted_by(key)
        divided = [micro_batch.of(name) for micro_batch in self.micro_batches]
        kept = [rows.stop - rows.start for rows in divided]
        encoded = [self.feed.encoded(rows) for rows in divided]
        described = f"encoders: {self.feed.described(key)}"
        whole, per_sample = assembled(described, pieces, kept, encoded)
        if whole is not None and per_sample:
            self.per_sample.add(key)
            whole = whole if batch is None else batch.in_batch_order(whole)
        if whole is not None:
            differentiable = whole.is_floating_point() or whole.is_complex()
            whole = whole.requires_grad_(self.requires_grad and differentiable)
        self.cached[key] = whole
