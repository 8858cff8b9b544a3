"""One step: the encoders' first pass, the loss, and in its node the second pass."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from megabatch.gradient_cache.autograd import (
    GradientSums,
    add_to_grad,
    attach,
    call_hooks_only_with_gradient,
    is_accumulated,
    reached_from,
)
from megabatch.gradient_cache.encoding import Encoding
from megabatch.gradient_cache.state import ForwardContext, ForwardState, cuda_devices
from megabatch.ranks import all_gather_numbers
from megabatch.torch_internals import graph_is_retained, parametrizations_not_cached

_BY_FORWARD = (
    "by a forward pass",
    "there are several for a batch. Update parameters once for each step, outside of the encoders "
    "(such as a moving average of weights), and let an encoder work on a copy of its batch",
)
_BETWEEN = (
    "in place after the step was called",
    "call loss.backward() before optimizer.step(), and leave batches as they are until then",
)


class Step:
    """A training step, from its encoders' first pass to the gradients.

    `second_pass` is the backward pass of the loss's node: it backpropagates the upstream gradient
    through the loss's own graph to the cached features, frees that graph, and encodes again. All
    foreseeable errors are raised before any `.grad` changes. Finally it releases everything.
    """

    def __init__(
        self,
        encodings: list[Encoding],
        number: int,
        group: Any,
        gradients_on_host: bool | None,
    ) -> None:
        """Save the context that the second pass needs, before the first pass of the encodings.

        `number`: of the step.
        """
        self.encodings = encodings
        self.inputs: list[Tensor] = []
        self._name = f"step {number}"
        self._group = group
        self._gradients_on_host = gradients_on_host
        self._devices = set().union(*(encoding.devices for encoding in encodings), cuda_devices())
        modules = [module for encoding in encodings for module in encoding.modules]
        self._context = ForwardContext(dict.fromkeys(modules), self._devices)
        self._loss_leaves: list[Tensor] = []
        self._loss: Tensor | None = None
        self._begun = False

    def first_pass(self, loss: Callable[..., Any], keywords: Mapping[str, Any]) -> Tensor:
        """Encode, and return the value of `loss(..., **keywords)` with the second pass's node."""
        try:
            # As below: weights that are cached without a graph pass no gradient on.
            with parametrizations_not_cached():
                for encoding in self.encodings:
                    encoding.forward()
            for encoding in self.encodings:  # without a second pass its rows are not used again
                encoding.check_unchanged(*_BY_FORWARD, batches=encoding.requires_grad)
            # Autocast caches casts of weights; those made without a graph pass no gradient on.
            torch.clear_autocast_cache()
            value = self._compute_loss(loss, keywords)
        except BaseException:
            for encoding in self.encodings:  # the traceback refers to them
                encoding.release()
            raise
        self.pending = PendingLoss(self.inputs)
        return attach(value, self.inputs, self.second_pass)

    def second_pass(self, upstream: Tensor, nodes: Sequence[Any]) -> Sequence[Tensor | None]:
        """Return the gradients of the inputs; see `autograd.Backward`."""
        accumulated = [is_accumulated(node) for node in nodes]
        self._check(all(accumulated))
        all_gather_numbers(f"GradientCache, backward pass of {self._name}", [], self._group)
        self.pending.end()
        self._begun = True
        sums = GradientSums(self.inputs, accumulated)
        buffers = [buffer for encoding in self.encodings for buffer in encoding.buffers]
        state = ForwardState(self._devices, dict.fromkeys(buffers))
        try:
            with self._context.restored(), torch.enable_grad():
                torch.clear_autocast_cache()  # casts from the first pass have no graph
                self._backward_of_loss(upstream, sums)
                self._encode_again(sums)
            results = sums.results()
            for tensor, gradient in zip(self.inputs, results, strict=True):
                if gradient is None:
                    call_hooks_only_with_gradient(tensor)
            return results or [None]
        finally:
            state.restore()
            self._release()

    def _compute_loss(self, function: Callable[..., Any], keywords: Mapping[str, Any]) -> Tensor:
        """Compute the loss of the cached outputs, shape (), and keep its graph."""
        self._loss = loss = loss_of(self.encodings, function, keywords)
        if not loss.requires_grad:
            raise ValueError("loss: the value returned depends on nothing that requires a gradient")
        features = {id(t): t for encoding in self.encodings for t in encoding.outputs.trained()}
        for tensor in features.values():  # the step's own backward pass accumulates nothing there
            tensor.register_post_accumulate_grad_hook(_refuse_gradient)
        leaves = reached_from([loss])[0].items()
        self._loss_leaves = [leaf for key, leaf in leaves if key not in features]
        inputs = [t for encoding in self.encodings for t in encoding.inputs]
        inputs += self._loss_leaves
        self.inputs = list({id(tensor): tensor for tensor in inputs}.values())
        return loss

    def _check(self, all_accumulated: bool) -> None:
        # With create_graph, gradients are enabled here.
        if self._begun or torch.is_grad_enabled() or graph_is_retained():
            raise RuntimeError(
                "GradientCache: expected one backward pass of a loss, without retain_graph=True "
                "and create_graph=True, as the step frees its graph in it; call the step again for "
                "another one, or add losses up before loss.backward()"
            )
        for encoding in self.encodings:
            if encoding.direct and not all_accumulated:
                raise RuntimeError(
                    "GradientCache: torch.autograd.grad and inputs= are not possible here: "
                    f"gradients of {encoding.name} go to .grad in each micro-batch (with "
                    "DistributedDataParallel, FSDP or a reentrant checkpoint); call loss.backward()"
                )
            if encoding.requires_grad:
                encoding.check_unchanged(*_BETWEEN, batches=True)

    def _backward_of_loss(self, upstream: Tensor, sums: GradientSums) -> None:
        """Backpropagate the loss to the cached features, and free those."""
        loss, self._loss = self._loss, None
        assert loss is not None
        wrapped = {id(t) for e in self.encodings if e.wrappers for t in e.inputs}
        # DDP and FSDP2 reduce these together with the second pass's additions to .grad.
        reduced = [leaf for leaf in self._loss_leaves if id(leaf) in wrapped]
        others = [leaf for leaf in self._loss_leaves if id(leaf) not in wrapped]
        features = [t for encoding in self.encodings for t in encoding.outputs.trained()]
        wanted = [*reduced, *features]
        gradients = sums.add_from([loss], [upstream.to(loss).reshape(())], others, wanted)
        found = {id(t): gradient for t, gradient in zip(wanted, gradients, strict=True)}
        for leaf in reduced:
            add_to_grad(leaf, found[id(leaf)])
        del loss, features, wanted, gradients
        for encoding in self.encodings:
            encoding.outputs.take_gradients(found, zeros=encoding.prepared)
        if any(encoding.encoded_twice for encoding in self.encodings):
            for encoding in self.encodings:
                encoding.outputs.move_gradients_to_host(self._gradients_on_host)

    def _encode_again(self, sums: GradientSums) -> None:
        for encoding in self.encodings:  # of all of them: then the memory is free
            encoding.backward_kept(sums)
        encodings = [encoding for encoding in self.encodings if encoding.outputs.gradients]
        for i, encoding in enumerate(encodings):
            later = any(encoding.encoder is other.encoder for other in encodings[i + 1 :])
            encoding.backward(sums, synchronise=not later)

    def _release(self) -> None:
        """Free batches and graphs, though the caller may keep the loss."""
        for encoding in self.encodings:  # a traceback may refer to them
            encoding.release()
        self.encodings, self.inputs, self._loss_leaves, self._loss = [], [], [], None


def loss_of(
    encodings: list[Encoding], function: Callable[..., Any], keywords: Mapping[str, Any]
) -> Tensor:
    """The loss of the cached outputs, shape ()."""
    args: list[Any] = []
    outputs: dict[str, Any] = {}
    for encoding in encodings:
        positional, named = encoding.outputs.arguments()
        args += positional
        outputs |= named
    loss = function(*args, **outputs, **keywords)
    if not isinstance(loss, Tensor):
        raise TypeError(f"loss: expected it to return a tensor, got {type(loss).__name__}")
    if loss.numel() != 1:
        raise ValueError(f"loss: expected it to return one number, got shape {(*loss.shape,)}")
    return loss.reshape(())


def _refuse_gradient(features: Tensor) -> None:
    """Raise an error if a backward pass of something else than the step's loss ends here."""
    features.grad = None
    raise RuntimeError(
        "GradientCache: a backward pass reached the features that were passed to the loss, but "
        "not through the step's loss, so it would not reach the encoders: compute everything "
        "that depends on the features inside the loss, and return the sum"
    )


class PendingLoss:
    """Raises an error if an optimizer steps for nothing, as the loss was not backpropagated.

    Nothing else would report such a loop: optimizers skip parameters without a gradient.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        """`parameters`: those that the loss depends on."""
        self._parameters = [weakref.ref(parameter) for parameter in parameters]
        self._hook = register_optimizer_step_post_hook(self._check)

    def end(self) -> None:
        """Check no more: the loss's backward pass begins, or another loss takes its place."""
        self._hook.remove()

    def _check(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        stepped = [p for group in optimizer.param_groups for p in group["params"]]
        have_gradients = any(parameter.grad is not None for parameter in stepped)
        waiting = {id(parameter()) for parameter in self._parameters}
        if have_gradients or waiting.isdisjoint(map(id, stepped)):
            return
        self.end()
        raise RuntimeError(
            "GradientCache: an optimizer stepped, but there is no gradient, as the loss of the "
            "last step was not backpropagated: call loss.backward() before optimizer.step() (a "
            "step does not fill .grad by itself), or call the step under torch.no_grad() if you "
            "only need the value of its loss"
        )
