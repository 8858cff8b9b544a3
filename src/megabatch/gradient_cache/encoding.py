"""One encoder's two passes over a batch's micro-batches."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from megabatch.gradient_cache.autograd import GradientSums, reached_from
from megabatch.gradient_cache.feed import Feed, MicroBatch, Parts
from megabatch.gradient_cache.outputs import CachedOutputs, Outputs
from megabatch.gradient_cache.state import (
    ForwardState,
    PassesCheck,
    Watched,
    cuda_devices,
    keep_running_statistics,
    possible_state,
)
from megabatch.gradient_cache.wrappers import (
    Wrappers,
    check_ddp_around,
    check_layout,
    modules_in,
    parameters_in,
)
from megabatch.torch_internals import ddp_around

#: An earlier micro-batch's backward pass changed weights, where hooks see each one's gradient.
_BY_HOOK = (
    "during the backward pass, before its last micro-batch",
    "a hook on gradients steps an optimizer. Here hooks are called for each micro-batch (with "
    "DistributedDataParallel or a reentrant checkpoint inside an encoder): call optimizer.step() "
    "after loss.backward() instead. Weights have changed: start anew",
)


class Encoding:
    """An encoder with its batches in one step, and the state between the passes.

    The first pass encodes each micro-batch. The last `kept` of them record their graphs, which wait
    in `graphs` for the backward pass; the second pass encodes the others again.

    Attributes:
        inputs: the tensors that get gradients: parameters, and batches that require a gradient.
        direct: whether gradients go to `.grad` in each micro-batch, by `.backward()`, as DDP, FSDP2
            and reentrant checkpoints need it.
    """

    def __init__(
        self, encoder: Any, feed: Feed, outputs: CachedOutputs, check: PassesCheck | None
    ) -> None:
        """Find the encoder's modules, parameters and wrappers; `check` compares both passes."""
        self.name = feed.name  # for messages
        self.encoder, self.feed, self.outputs = encoder, feed, outputs
        self.modules = modules_in(encoder)
        self.wrappers = Wrappers(self.modules)
        self.parameters = parameters_in(encoder)
        check_layout(self.name, self.parameters.values())
        tensors = [*self.parameters.values(), *feed.tensors]
        self.inputs = [tensor for tensor in tensors if tensor.requires_grad]
        self.devices = cuda_devices(tensors)
        if feed.device is not None and feed.device.type == "cuda":
            self.devices.add(feed.device)
        trained = any(parameter.requires_grad for parameter in self.parameters.values())
        self.requires_grad = isinstance(encoder, nn.Module) and trained
        self.direct = bool(self.wrappers)
        self._ddp_around = ddp_around()
        self._watched = [
            Watched(f"parameter {name}", p)
            for name, p in self.parameters.items()
            if not p.is_inference() and (not self.wrappers.shards or hasattr(p, "device_mesh"))
        ]
        self._batches = [Watched(k, t) for k, t in feed.watched.items() if not t.is_inference()]
        self.buffers = possible_state(self.modules)
        self._states: list[ForwardState] = []  # before each micro-batch
        self.micro_batches: list[MicroBatch] = []
        self.kept, self._only = 0, False
        self.graphs: list[Outputs] = []
        self._check = check
        self._first: Outputs = {}  # of micro-batch 0, to be compared

    def divide(self, count: int, most: int, *, only: bool) -> None:
        """Add idle micro-batches up to `count`, and keep the graphs of the last `most`.

        `only`: no encoder has more than one micro-batch on any rank, whose graph is always kept.
        Otherwise, with wrappers, the micro-batch that synchronises is encoded again, after all
        other backward passes, as DDP prepares its reduction in a forward pass.
        """
        idle = MicroBatch(slice(self.feed.rows, self.feed.rows))
        self.micro_batches += [idle] * (count - len(self.micro_batches))
        self._only = only
        self.kept = 1 if only else min(most, count - bool(self.wrappers))

    @property
    def encoded_twice(self) -> list[MicroBatch]:
        """The micro-batches without a graph that is kept."""
        return self.micro_batches[: len(self.micro_batches) - self.kept]

    @property
    def prepared(self) -> bool:
        """Whether wrappers wait for the gradients of the only graph, which they will reduce."""
        return self._only and bool(self.wrappers)

    def release(self) -> None:
        """Free the graphs that were kept, and features to be compared."""
        self.graphs, self._first = [], {}

    def forward(self) -> None:
        """Encode all micro-batches: with a graph those to be kept, without one the others.

        Before each of them the random state is saved for the second pass.
        """
        if self._only:
            self.wrappers.prepare()
        pieces = []
        feed = contextlib.closing(self.feed(self.micro_batches))
        with self.wrappers.synchronising(self._only), feed as fed:
            for i, (micro_batch, parts) in enumerate(zip(self.micro_batches, fed, strict=True)):
                pieces.append(self._forward_one(i, micro_batch, parts))
                del parts
        if self._check is not None:
            self._first = pieces[0]
        self.outputs.join(pieces, self.micro_batches, requires_grad=self.requires_grad)

    def check_unchanged(self, by: str, advice: str, *, batches: bool) -> None:
        """Raise a RuntimeError if a parameter, or one of the batches, was changed in this step."""
        for watched in (*self._watched, *(self._batches if batches else ())):
            if watched.changed():
                raise RuntimeError(
                    f"GradientCache: {watched.name} of {self.name} was changed {by}: {advice}"
                )

    def backward_kept(self, sums: GradientSums) -> None:
        """Backpropagate through the graphs that were kept, and free one after the other."""
        if self.prepared:
            return  # after all other backward passes
        if not self.outputs.gradients:
            self.release()
        with self.wrappers.synchronising(False):
            for micro_batch in self.micro_batches[len(self.micro_batches) - len(self.graphs) :]:
                last = not self.encoded_twice and len(self.graphs) == 1
                self._backpropagate(self.graphs.pop(0), micro_batch, last, sums)

    def backward(self, sums: GradientSums, *, synchronise: bool) -> None:
        """Encode micro-batches again, with a graph, and backpropagate the cached gradients.

        With `synchronise`, DDP and FSDP2 do in the last micro-batch what they were set to do when
        the step was called: reduce the gradients over ranks, unless under `no_sync`.
        """
        if self.graphs and self.wrappers.are_prepared():
            with self.wrappers.synchronising(True):
                self._backpropagate(self.graphs.pop(), self.micro_batches[0], True, sums)
            return
        if self.graphs:  # for the sum of two losses: DDP is prepared for the other
            self.graphs, self.kept = [], 0
        again = self.encoded_twice
        self.wrappers.prepare()
        feed = contextlib.closing(self.feed(again))
        with keep_running_statistics(self.modules), feed as fed:
            for i, (micro_batch, parts) in enumerate(zip(again, fed, strict=True)):
                last = i == len(again) - 1
                self._states[i].restore()
                with self.wrappers.synchronising(last and synchronise):
                    self._backward_one(i, micro_batch, parts, last, sums)
                del parts
        self.outputs.gradients.clear()

    # These are functions so that a micro-batch's graph is freed when they return.

    def _forward_one(self, i: int, micro_batch: MicroBatch, parts: Parts) -> Outputs:
        keep = i >= len(self.encoded_twice)
        if i == len(self.encoded_twice):
            # Autocast caches casts of weights; those made without a graph pass no gradient on.
            torch.clear_autocast_cache()
        # Only the outputs of a function show whether it depends on a parameter: record empty graphs
        # until one does.
        graph = torch.is_grad_enabled() and (keep or not self.requires_grad)
        state = ForwardState(self.devices, self.buffers)
        self._states.append(state)
        statistics = keep_running_statistics(self.modules if micro_batch.idle else [])
        with statistics, torch.set_grad_enabled(graph):
            outputs = self._encode(parts)
        if i == 0:
            self.buffers = state.keep_updated(compare=self._check is not None)
        if micro_batch.idle:  # its rows are no data, and leave no trace
            state.restore_buffers()
        trained = [t for t in outputs.values() if t is not None and t.requires_grad]
        self.requires_grad |= bool(trained)
        self.direct |= self._leaves_of(trained)[1]
        if keep:
            self.graphs.append(outputs)
        return self.outputs.without_graph(outputs)

    def _leaves_of(self, outputs: list[Tensor]) -> tuple[dict[int, Tensor], bool]:
        """As `reached_from`; raise a RuntimeError if a parameter is not one of the inputs.

        A wrapper around it may be out of sight, too, and would reduce each micro-batch's gradient.
        FSDP replaces parameters while its modules run.
        """
        leaves, reentrant = reached_from(outputs)
        known = {id(tensor) for tensor in self.inputs}
        parameters = (leaf for leaf in leaves.values() if isinstance(leaf, nn.Parameter))
        hidden = [parameter for parameter in parameters if id(parameter) not in known]
        if hidden and not self.wrappers.shards:
            raise RuntimeError(
                f"GradientCache: {self.name} uses a parameter of shape {(*hidden[0].shape,)} that "
                "is in no module found in it: expected a module, a function that refers to the "
                "modules it calls, or a method of an object with them among its attributes"
            )
        return leaves, reentrant

    def _backward_one(
        self, i: int, micro_batch: MicroBatch, parts: Parts, last: bool, sums: GradientSums
    ) -> None:
        encoded = self._encode(parts)
        if i == 0 and self._check is not None:
            self._check.compare(self.name, self._first, self.outputs.without_graph(encoded))
            self._first = {}
        self._backpropagate(encoded, micro_batch, last, sums)

    def _backpropagate(
        self, encoded: Outputs, micro_batch: MicroBatch, last: bool, sums: GradientSums
    ) -> None:
        """Backpropagate the gradients of one micro-batch's outputs."""
        outputs, upstream = self.outputs.with_gradients(encoded, micro_batch, last=last)
        if not outputs:
            return
        leaves, reentrant = self._leaves_of(outputs)
        self.check_unchanged(*_BY_HOOK, batches=False)
        if not (self.direct or reentrant):
            sums.add_from(outputs, upstream, leaves.values())
            return
        if len(self.micro_batches) > 1 and not self.wrappers:
            check_ddp_around(self.name, self._ddp_around)
        if last and not reentrant:
            self.wrappers.check_all_used(self.name, leaves)
        torch.autograd.backward(outputs, upstream)

    def _encode(self, parts: Parts) -> Outputs:
        """Call the encoder; explain why one that takes keywords fails."""
        *positional, named = parts
        try:
            output = self.encoder(*positional, **named)
        except (AttributeError, TypeError) as error:
            mapping = any(isinstance(batch, Mapping) for batch in positional)
            if not (mapping and isinstance(self.encoder, nn.Module)):
                raise
            raise TypeError(
                f"encoders: {self.name} failed for a mapping as one argument ({error}); if its "
                "entries are keywords of the model, as of Hugging Face's, expected such an "
                "encoder: lambda batch: model(**batch).pooler_output (or another output)"
            ) from error
        return self.outputs.read(output)
