"""One encoder's two passes over a batch's micro-batches."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from megabatch.gradient_cache.arguments import call
from megabatch.gradient_cache.autograd import add_to_grad, reached_from
from megabatch.gradient_cache.batches import tensors_in
from megabatch.gradient_cache.buffers import UpdatedBuffers
from megabatch.gradient_cache.by_length import Orders
from megabatch.gradient_cache.checks import PassesCheck, Versions, check_ddp_around, check_hooks
from megabatch.gradient_cache.division import MicroBatch
from megabatch.gradient_cache.feed import Feed, Parts
from megabatch.gradient_cache.frozen import FrozenParts
from megabatch.gradient_cache.offload import allocated
from megabatch.gradient_cache.outputs import OutputForm, Outputs, assembled
from megabatch.gradient_cache.state import (
    RandomState,
    are_prepared,
    check_all_used,
    cuda_devices,
    get_random_state,
    gradient_wrappers,
    keep_running_statistics,
    modules_in,
    no_sync,
    parameters_in,
    prepare,
    reduces_by_itself,
    set_random_state,
    sync_settings,
    with_sync,
)
from megabatch.gradient_cache.sums import GradientSums
from megabatch.torch_internals import ddp_around


class Encoding:
    """An encoder with its batches in one step, and the state between the passes.

    After `forward`, `cached` holds the outputs of the whole batch as leaves of the loss's graph,
    and `per_sample` the keys of those that have a row per sample. After `backward`, `activations`
    has the GPU memory of each micro-batch's graph, in bytes, by the number of the micro-batch.

    The last `kept` micro-batches are encoded once: `forward` records their graphs, which wait in
    `graphs`, by their outputs, for `backward_kept`. The graph of `forward_once` waits there, too.

    `inputs` are the tensors that get gradients: trainable parameters, and batches that require a
    gradient. `direct`: gradients go to `.grad` in each micro-batch, by `.backward()`, as DDP,
    FSDP2, reentrant checkpoints and parameters that are not visible from outside need it.
    """

    def __init__(
        self,
        name: str,
        encoder: Any,
        feed: Feed,
        form: OutputForm,
        feature_dtype: torch.dtype | None = None,
        orders: Orders | None = None,
    ) -> None:
        """Find the encoder's modules, parameters and wrappers; `name` is for messages."""
        self.name = name
        self.encoder = encoder
        self.feed = feed
        self.form = form
        self.feature_dtype = feature_dtype
        self._check: PassesCheck | None = None
        self._first: Outputs = {}  # of micro-batch 0, to be compared
        self.orders = orders or Orders(name, {})
        self.micro_batches: list[MicroBatch] = []
        self.modules = modules_in(encoder)
        self.wrappers = gradient_wrappers(self.modules)
        self._sync = sync_settings(self.wrappers)
        self._no_sync = no_sync(self.wrappers)
        parameters = parameters_in(encoder)
        tensors = tensors_in(feed.batches)
        self.devices = cuda_devices(tensors, parameters.values())
        if feed.device is not None and feed.device.type == "cuda":
            self.devices.add(feed.device)
        self.inputs = [t for t in (*parameters.values(), *tensors) if t.requires_grad]
        self.direct = bool(self.wrappers) or reduces_by_itself(self.modules)
        self._may_keep = not reduces_by_itself(self.modules)
        self.requires_grad = isinstance(encoder, nn.Module) and any(
            parameter.requires_grad for parameter in parameters.values()
        )
        self.versions = Versions(parameters, feed.named, self.wrappers)
        self.buffers = UpdatedBuffers(self.modules)
        self.random_states: list[RandomState] = []
        self.cached: Outputs = {}
        self.gradients: Outputs = {}
        self.activations: dict[int, int] = {}
        self.kept = 0
        self.graphs: list[Outputs] = []
        self._preparation = object()
        self._ddp_around = ddp_around()
        self._hidden_leaves = False
        self.per_sample: set[Any] = set()

    @functools.cached_property
    def frozen(self) -> FrozenParts:
        """Parts that need not run in the second pass; searched for only if there is one."""
        return FrozenParts(self.modules, self.devices)

    def keep(self, most: int) -> None:
        """Choose the graphs to keep for the second pass: those of the last `most` micro-batches.

        DDP prepares its reduction in a forward pass, for the next gradients that come. So with
        wrappers the micro-batch that synchronises is always encoded again, after all other backward
        passes. FSDP1 cannot hold back its reduction, and reduces only the gradients of its latest
        forward pass: it keeps none.
        """
        possible = len(self.micro_batches) - bool(self.wrappers) if self._may_keep else 0
        self.kept = min(most, possible)

    @property
    def recomputed(self) -> int:
        """Number of micro-batches, the first ones, that `backward` encodes again."""
        return len(self.micro_batches) - self.kept

    def release(self) -> None:
        """Free the graphs that were kept, and features to be compared."""
        self.graphs, self._first = [], {}

    def forward(self, *, second_pass: bool, check: PassesCheck | None = None) -> None:
        """Encode all micro-batches: with a graph those to be kept, without one the others.

        For a `second_pass`, save the random state before each of them. `check` compares the first
        one's features in both passes.
        """
        self._check, pieces = check, []
        feed = contextlib.closing(self.feed(self.micro_batches))
        with with_sync(self._no_sync), feed as fed:
            for i, (micro_batch, parts) in enumerate(zip(self.micro_batches, fed, strict=True)):
                if not second_pass:
                    pieces.append(self._evaluate_one(micro_batch, parts))
                elif i < self.recomputed:
                    pieces.append(self._forward_one(i, micro_batch, parts))
                    if i == 0 and self._check is not None:
                        self._first = pieces[0]
                else:
                    pieces.append(self._forward_kept(i, micro_batch, parts))
                del parts
        if any(piece.keys() != pieces[0].keys() for piece in pieces):
            raise ValueError(f"encoders: {self.name} gave different outputs for two micro-batches")
        for key in pieces[0]:
            self._cache(key, [piece[key] for piece in pieces])
        self.orders.check(self.per_sample)

    def forward_once(self) -> None:
        """Encode the only micro-batch, keeping its graph for `backward_once`.

        Wrappers prepare here for the gradients that they will reduce over ranks.
        """
        before = allocated(self.devices)
        (micro_batch,) = self.micro_batches
        self.random_states.append(get_random_state(self.devices))
        self._preparation = prepare(self.wrappers)
        with contextlib.closing(self.feed([micro_batch])) as fed:
            (parts,) = fed
            with self._updates_of(micro_batch):
                graph = self._encode(parts)
        self.graphs = [graph]
        self.activations[0] = allocated(self.devices) - before
        self._inspect_graph(graph)
        for key, output in self._without_graph(graph).items():
            self._cache(key, [output])
        self.orders.check(self.per_sample)

    def take_gradients(self, gradients: Outputs, store: Callable[[Tensor], Tensor]) -> None:
        """Replace the cached outputs by their gradients; `store` moves those per sample."""
        self.cached = {}
        self.gradients = gradients
        for key in self.per_sample:
            gradient = gradients[key]
            if gradient is not None:
                gradients[key] = store(self.orders.in_own_order(key, gradient))

    def has_gradients(self) -> bool:
        """Whether any output got a gradient, so that `backward` has work to do."""
        return any(gradient is not None for gradient in self.gradients.values())

    def backward_once(self, sums: GradientSums) -> None:
        """Backpropagate through the graph of the only micro-batch, and free it."""
        graph = self.graphs.pop()
        if not are_prepared(self.wrappers, self._preparation):  # the sum of two losses
            del graph
            self.backward(sums, synchronise=True)
            return
        if self.wrappers and not self.has_gradients():
            # They wait for all of their gradients, and would refuse the next step.
            self.gradients = {
                key: None if output is None else torch.zeros_like(output)
                for key, output in graph.items()
            }
        with with_sync(self._sync):
            self._backpropagate(graph, self.micro_batches[0], True, sums)
        self.gradients = {}

    def backward_kept(self, sums: GradientSums) -> None:
        """Backpropagate through the graphs that were kept, and free one after the other."""
        if not self.has_gradients():
            self.release()
        with with_sync(self._no_sync):
            for micro_batch in self.micro_batches[len(self.micro_batches) - len(self.graphs) :]:
                last = not self.recomputed and len(self.graphs) == 1
                self._backpropagate(self.graphs.pop(0), micro_batch, last, sums)

    def backward(self, sums: GradientSums, *, synchronise: bool) -> None:
        """Encode micro-batches again, with a graph, and backpropagate the cached gradients.

        With `synchronise`, DDP and FSDP2 do in the last micro-batch what they were set to do when
        the step was called: reduce the gradients over ranks, unless under `no_sync`.
        """
        micro_batches = self.micro_batches[: self.recomputed]
        prepare(self.wrappers)
        feed = contextlib.closing(self.feed(micro_batches))
        with keep_running_statistics(self.modules), self.buffers.second_pass(), feed as fed:
            for i, (micro_batch, parts) in enumerate(zip(micro_batches, fed, strict=True)):
                last = i == len(micro_batches) - 1
                set_random_state(self.random_states[i])
                self.buffers.set_for(i)
                with with_sync(self._sync if last and synchronise else self._no_sync):
                    self._backward_one(i, micro_batch, parts, last, sums)
                del parts
        self.gradients = {}

    def single_output(self) -> Tensor:
        """Return the cached output of an encoder that must have only one."""
        output = next(iter(self.cached.values()), None)
        if len(self.cached) != 1 or output is None:
            got = ", ".join(type(value).__name__ for value in self.cached.values())
            raise TypeError(
                "encoders: with several encoders each must return one tensor (or outputs= select "
                f"one), but {self.name} returned ({got})"
            )
        return output

    # These are functions so that a micro-batch's graph is freed when they return.

    def _forward_one(self, i: int, micro_batch: MicroBatch, parts: Parts) -> Outputs:
        self.random_states.append(get_random_state(self.devices))
        # Only the outputs show whether a frozen module, or a callable that is not a module, depends
        # on a parameter. Record graphs until one does: the earlier ones are empty.
        graph = not self.requires_grad or (i == 0 and bool(self.frozen))
        first_pass = self.frozen.first_pass(i)
        with self._updates_of(micro_batch), torch.set_grad_enabled(graph), first_pass:
            outputs = self._encode(parts)
        if graph:
            self._inspect_graph(outputs)
        return self._without_graph(outputs)

    def _forward_kept(self, i: int, micro_batch: MicroBatch, parts: Parts) -> Outputs:
        if i == self.recomputed:
            # Autocast caches casts of weights; those made without a graph pass no gradient on.
            torch.clear_autocast_cache()
        before = allocated(self.devices)
        self.random_states.append(get_random_state(self.devices))
        with self._updates_of(micro_batch):
            outputs = self._encode(parts)
        self.activations[i] = allocated(self.devices) - before
        self._inspect_graph(outputs)
        # Leaves that were not found are FSDP2's whole parameters. Otherwise their wrapper may not
        # have been found either, and would synchronise only in the first of several backward
        # passes.
        if self.requires_grad and (self.wrappers or not self._hidden_leaves):
            self.graphs.append(outputs)
        else:
            self.kept = 0
            self.release()
        return self._without_graph(outputs)

    def _evaluate_one(self, micro_batch: MicroBatch, parts: Parts) -> Outputs:
        with self._statistics_of(micro_batch):
            outputs = self._encode(parts)
        return self._without_graph(outputs)

    def _inspect_graph(self, outputs: Outputs) -> None:
        """Find out from a graph which leaves the outputs depend on."""
        tensors = [tensor for tensor in outputs.values() if tensor is not None]
        if not any(tensor.requires_grad for tensor in tensors):
            return
        self.requires_grad = True
        known = {id(tensor) for tensor in self.inputs}
        reached = reached_from(tensors, self._graph_inputs())
        # Other leaves are of one micro-batch: PEFT lets embeddings' outputs require a gradient.
        leaves = [leaf for leaf in reached.leaves.values() if isinstance(leaf, nn.Parameter)]
        hidden = [leaf for leaf in leaves if id(leaf) not in known]
        self.inputs += hidden
        self._hidden_leaves |= bool(hidden)
        self.direct |= bool(hidden) or reached.reentrant

    def _graph_inputs(self) -> list[Tensor]:
        """Batches that are results of another graph."""
        return [tensor for tensor in self.inputs if not tensor.is_leaf]

    @contextlib.contextmanager
    def _updates_of(self, micro_batch: MicroBatch) -> Iterator[None]:
        """Note the values of buffers before a micro-batch; keep an idle one out of them."""
        compare = self._check is not None
        buffers = self.buffers.first_pass(idle=micro_batch.idle, compare=compare)
        with self._statistics_of(micro_batch), buffers:
            yield

    def _statistics_of(self, micro_batch: MicroBatch) -> AbstractContextManager[None]:
        """Keep an idle micro-batch's rows, which are no data, out of running statistics."""
        if micro_batch.idle:
            return keep_running_statistics(self.modules)
        return contextlib.nullcontext()

    def _without_graph(self, outputs: Outputs) -> Outputs:
        return {key: None if out is None else self._to_cache(out) for key, out in outputs.items()}

    def _to_cache(self, output: Tensor) -> Tensor:
        output = output.detach()
        narrow = self.feature_dtype is not None and output.ndim > 1 and output.is_floating_point()
        return output.to(self.feature_dtype) if narrow else output

    def _backward_one(
        self, i: int, micro_batch: MicroBatch, parts: Parts, last: bool, sums: GradientSums
    ) -> None:
        before = allocated(self.devices)
        with self.frozen.second_pass(i):
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
                rows = self.orders.rows_of(key, micro_batch)
                outputs.append(output[: rows.stop - rows.start])  # no row if it is idle
                # From the host it is copied while the backward pass is being launched.
                upstream.append(gradient[rows].to(output, non_blocking=True))
            else:  # counted once, but every micro-batch reaches the same parameters, for DDP
                outputs.append(output)
                upstream.append(gradient if last else torch.zeros_like(gradient))
        if not outputs:
            return
        graph_inputs = self._graph_inputs()
        reached = reached_from(outputs, graph_inputs)
        known = [leaf for leaf in reached.leaves.values() if leaf in sums]
        others = [leaf for leaf in reached.leaves.values() if leaf not in sums]
        hidden = [leaf for leaf in others if isinstance(leaf, nn.Parameter)]
        check_hooks(self.name, self.versions, reached.leaves.values() if self.direct else hidden)
        if self.direct or reached.reentrant or hidden:
            if len(self.micro_batches) > 1 and not self.wrappers:
                check_ddp_around(self.name, self._ddp_around)
            if last and not reached.reentrant:
                check_all_used(self.name, self.wrappers, reached.leaves)
            torch.autograd.backward(outputs, upstream)
            return
        gradients = sums.add_from(outputs, upstream, [*known, *graph_inputs], others)
        for leaf, gradient in zip(others, gradients, strict=True):
            add_to_grad(leaf, gradient)

    def _encode(self, parts: Parts) -> Outputs:
        *positional, named = parts
        return self.form.read(call(self.name, self.encoder, positional, named))

    def _cache(self, key: Any, pieces: list[Tensor | None]) -> None:
        """Assemble one output from its micro-batches, as a leaf for the loss's gradient."""
        name = f"encoders: {self.orders.described(key)}"
        divided = [self.orders.rows_of(key, micro_batch) for micro_batch in self.micro_batches]
        kept = [rows.stop - rows.start for rows in divided]
        encoded = [self.feed.encoded(rows) for rows in divided]
        whole, per_sample = assembled(name, pieces, kept, encoded)
        if per_sample:
            self.per_sample.add(key)
        if per_sample and whole is not None:
            whole = self.orders.in_batch_order(key, whole)
        if whole is not None:
            differentiable = whole.is_floating_point() or whole.is_complex()
            whole = whole.requires_grad_(self.requires_grad and differentiable)
        self.cached[key] = whole
