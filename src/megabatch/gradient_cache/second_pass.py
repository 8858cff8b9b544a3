"""The second pass of a step, from its loss to the gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from megabatch.gradient_cache.autograd import add_to_grad, is_accumulated, reached_from, spare_hooks
from megabatch.gradient_cache.encoding import Encoding
from megabatch.gradient_cache.forward_context import ForwardContext
from megabatch.gradient_cache.offload import OffloadPolicy, to_host
from megabatch.gradient_cache.outputs import Outputs
from megabatch.gradient_cache.state import cuda_devices, get_random_state, set_random_state
from megabatch.gradient_cache.sums import GradientSums, may_add_in_place
from megabatch.torch_internals import graph_is_retained

_SECOND_BACKWARD = (
    "GradientCache: expected one backward pass of a loss, got a second one; call the step again, "
    "or add losses up before loss.backward()"
)


class SecondPass:
    """A step whose first pass is done, until its loss is backpropagated.

    Calling it is the backward pass of the loss's node: it backpropagates the upstream gradient
    through the loss's own graph to the cached features, frees that graph, and encodes again. All
    foreseeable errors are raised before any `.grad` changes. Finally it releases everything.
    """

    def __init__(
        self,
        encodings: list[Encoding],
        *,
        once: bool,
        offload: OffloadPolicy,
        gradients_on_host: bool | None,
        announce: Callable[[], None],
        kept_backward: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """Save the context that the second pass needs.

        Args:
            encodings: before their first pass.
            once: whether they keep the graph of their only micro-batch.
            offload: decides where gradients of features wait.
            gradients_on_host: as in GradientCache.
            announce: tells the other ranks that the backward pass begins here.
            kept_backward: makes the context in which graphs that were kept go backward.
        """
        self.encodings = encodings
        self.begun = False
        self._once = once
        self._offload = offload
        self._gradients_on_host = gradients_on_host
        self._announce = announce
        self._kept_backward = kept_backward
        modules = [module for encoding in encodings for module in encoding.modules]
        self._devices = set().union(*(encoding.devices for encoding in encodings), cuda_devices())
        self._context = ForwardContext(dict.fromkeys(modules), self._devices)
        self._aliases: dict[Tensor, Tensor] = {}
        self._loss_leaves: list[Tensor] = []
        self.loss: Tensor | None = None
        self.inputs: list[Tensor] = []

    def loss_of(
        self,
        function: Callable[..., Tensor],
        args: Sequence[Any],
        kwargs: Mapping[Any, Any],
        loss_kwargs: Mapping[str, Any],
    ) -> Tensor:
        """Compute the loss of the cached outputs, shape (), and keep its graph.

        Args:
            function: the loss.
            args, kwargs: the cached outputs.
            loss_kwargs: the caller's keywords.

        Raises:
            TypeError, ValueError: it is not one number, or depends on nothing that requires a
                gradient.
        """
        detached = {name: self._detached(value) for name, value in loss_kwargs.items()}
        loss = checked_loss(function(*args, **kwargs, **detached))
        if not loss.requires_grad:
            raise ValueError("loss: the value returned depends on nothing that requires a gradient")
        features = {id(t): t for encoding in self.encodings for t in _trained(encoding.cached)}
        for tensor in features.values():  # the step's own backward pass accumulates nothing there
            tensor.register_post_accumulate_grad_hook(_refuse_gradient)
        aliases = {id(alias) for alias in self._aliases.values()}
        self._loss_leaves = [
            leaf
            for key, leaf in reached_from([loss]).leaves.items()
            if key not in features and key not in aliases
        ]
        inputs = [t for encoding in self.encodings for t in encoding.inputs]
        inputs += [*self._loss_leaves, *self._aliases]
        self.inputs = list({id(tensor): tensor for tensor in inputs}.values())
        self.loss = loss.reshape(())
        return self.loss

    def __call__(self, upstream: Tensor, nodes: Sequence[Any]) -> Sequence[Tensor | None]:
        """Run the second pass; see `autograd.Backward`."""
        accumulated = [is_accumulated(node) for node in nodes]
        self._check(all(accumulated))
        self._announce()
        self.begun = True
        sums = GradientSums(
            self.inputs,
            [
                added and tensor.is_leaf and may_add_in_place(tensor)
                for added, tensor in zip(accumulated, self.inputs, strict=False)
            ],
        )
        random_state = get_random_state(self._devices)
        try:
            with sums, self._context.restored(), torch.enable_grad():
                torch.clear_autocast_cache()  # casts from the first pass have no graph
                self._backward_of_loss(upstream, sums)
                self._second_pass(sums)
            results = sums.results()
            for tensor, gradient in zip(self.inputs, results, strict=True):
                if gradient is None and tensor.is_leaf:
                    spare_hooks(tensor)
            return results or [None]
        finally:
            set_random_state(random_state)
            self._release()

    def check_forward_passes(self) -> None:
        """Check, after the first pass, that forward passes have changed no tensor.

        Raises:
            RuntimeError: one has, as a model does that updates a moving average of its weights.
        """
        for encoding in self.encodings:
            changed = encoding.versions.changed_parameter()
            if changed:
                raise RuntimeError(
                    f"GradientCache: a forward pass changed {changed} of {encoding.name}. There "
                    "are several forward passes for a batch, so it would change several times: "
                    "leave that out of the encoders' forward, and do it once for each step, such "
                    "as the update of a moving average of weights before the step is called"
                )
            changed = encoding.versions.changed()
            if changed and encoding.requires_grad:  # else its rows are not used again
                raise RuntimeError(
                    f"GradientCache: a forward pass changed {changed} of {encoding.name} in place, "
                    "which the second pass needs as it was: let the encoder work on a copy"
                )

    def _check(self, all_accumulated: bool) -> None:
        if self.begun:
            raise RuntimeError(_SECOND_BACKWARD)
        if torch.is_grad_enabled():
            raise RuntimeError(
                "GradientCache: create_graph=True is not possible: the second pass keeps no graph "
                "to differentiate again"
            )
        if graph_is_retained():
            raise RuntimeError(
                "GradientCache: retain_graph=True is not possible: the step frees its graph when "
                "it is backpropagated; call the step again for another backward pass"
            )
        for encoding in self.encodings:
            if encoding.direct and not all_accumulated:
                raise RuntimeError(
                    "GradientCache: torch.autograd.grad and inputs= are not possible here: "
                    f"{encoding.name} has gradients that go to .grad in each micro-batch (of "
                    "DistributedDataParallel, fully_shard, a reentrant checkpoint, or a "
                    "parameter that cannot be found); call loss.backward()"
                )
            changed = encoding.requires_grad and encoding.versions.changed()
            if changed:
                raise RuntimeError(
                    f"GradientCache: {changed} of {encoding.name} was changed in place after the "
                    "step was called; call loss.backward() before optimizer.step(), and leave "
                    "batches as they are until then"
                )

    def _backward_of_loss(self, upstream: Tensor, sums: GradientSums) -> None:
        """Backpropagate the loss to the cached features, and free those."""
        loss, self.loss = self.loss, None
        assert loss is not None
        wrapped = {id(t) for e in self.encodings if e.wrappers for t in e.inputs}
        # DDP and FSDP2 reduce these together with the second pass's additions to .grad.
        reduced = [leaf for leaf in self._loss_leaves if id(leaf) in wrapped]
        others = [leaf for leaf in self._loss_leaves if id(leaf) not in wrapped]
        features = [tensor for encoding in self.encodings for tensor in _trained(encoding.cached)]
        aliases = list(self._aliases.values())
        wanted = [*features, *reduced, *aliases]
        found = iter(sums.add_from([loss], [upstream.to(loss).reshape(())], others, wanted))
        gradients: list[Outputs] = [
            {key: next(found) if _is_trained(t) else None for key, t in e.cached.items()}
            for e in self.encodings
        ]
        for leaf in reduced:
            add_to_grad(leaf, next(found))
        for tensor in self._aliases:
            gradient = next(found)
            if gradient is not None:
                sums.add(tensor, gradient)
        del loss, features, wanted, found
        self._store(gradients)

    def _store(self, gradients: list[Outputs]) -> None:
        """Replace the features by their gradients, on the GPU if they fit, else on the host."""
        host = False if self._once else self._gradients_on_host
        if host is None:
            large = [
                gradient
                for encoding, found in zip(self.encodings, gradients, strict=True)
                for key, gradient in found.items()
                if gradient is not None and key in encoding.per_sample
            ]
            modules = (module for encoding in self.encodings for module in encoding.modules)
            graphs = any(encoding.graphs for encoding in self.encodings)
            host = not self._offload.fits(large, modules, graphs=graphs)
            del large
        for encoding, found in zip(self.encodings, gradients, strict=True):
            encoding.take_gradients(found, to_host if host else lambda gradient: gradient)

    def _second_pass(self, sums: GradientSums) -> None:
        if self._once:
            for encoding in self.encodings:
                encoding.backward_once(sums)
            return
        self._offload.memory.second_pass_begins(self._devices)
        with self._kept_backward():  # of all encodings: what is encoded again has the memory
            for encoding in self.encodings:
                encoding.backward_kept(sums)
        replayed = [encoding for encoding in self.encodings if encoding.has_gradients()]
        for i, encoding in enumerate(replayed):
            again = any(encoding.encoder is later.encoder for later in replayed[i + 1 :])
            encoding.backward(sums, synchronise=not again)
            graphs = [size for _, size in sorted(encoding.activations.items())]
            self._offload.memory.measured(encoding.name, graphs)

    def _detached(self, value: Any) -> Any:
        """Replace a tensor that is the result of another graph by a leaf.

        That graph belongs to the caller, who may also use it elsewhere; its gradient leaves through
        the step's node.
        """
        if not (isinstance(value, Tensor) and value.requires_grad and not value.is_leaf):
            return value
        if value not in self._aliases:
            self._aliases[value] = value.detach().requires_grad_()
        return self._aliases[value]

    def _release(self) -> None:
        """Free batches and graphs, though the caller may keep the loss."""
        for encoding in self.encodings:  # a traceback may refer to them
            encoding.release()
        self.encodings, self.inputs, self._loss_leaves = [], [], []
        self._aliases = {}
        self.loss = None


def checked_loss(loss: Any) -> Tensor:
    """Return the loss if it is one number.

    Raises:
        TypeError, ValueError: it is not.
    """
    if not isinstance(loss, Tensor):
        raise TypeError(f"loss: expected it to return a tensor, got {type(loss).__name__}")
    if loss.numel() != 1:
        raise ValueError(f"loss: expected it to return one number, got shape {(*loss.shape,)}")
    return loss


def _trained(cached: Mapping[Any, Tensor | None]) -> list[Tensor]:
    """The cached outputs that get a gradient."""
    return [tensor for tensor in cached.values() if tensor is not None and tensor.requires_grad]


def _is_trained(tensor: Tensor | None) -> bool:
    return tensor is not None and tensor.requires_grad


def _refuse_gradient(features: Tensor) -> None:
    """Raise an error if a backward pass of something else than the step's loss ends here."""
    features.grad = None
    raise RuntimeError(
        "GradientCache: a backward pass reached the features that were passed to the loss, but "
        "not through the step's loss, so it would not reach the encoders: compute everything "
        "that depends on the features inside the loss, and return the sum"
    )
