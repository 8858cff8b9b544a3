"""One step: the encoders' first pass, the loss, and in its node the second pass."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megabatch.gradient_cache.autograd import (
    GradientSums,
    add_to_grad,
    attach,
    call_hooks_only_with_gradient,
    is_accumulated,
    reached_from,
)
from megabatch.gradient_cache.checks import PassesCheck, PendingLoss, out_of_memory_on_all_ranks
from megabatch.gradient_cache.encoding import Encoding
from megabatch.gradient_cache.offload import StepMemory, to_host
from megabatch.gradient_cache.outputs import Outputs, single
from megabatch.gradient_cache.state import ForwardContext, RandomState, cuda_devices
from megabatch.ranks import all_gather_numbers, global_ranks
from megabatch.torch_internals import graph_is_retained, parametrizations_not_cached


class Step:
    """A training step, from its encoders' first pass to the gradients.

    `second_pass` is the backward pass of the loss's node: it backpropagates the upstream gradient
    through the loss's own graph to the cached features, frees that graph, and encodes again. All
    foreseeable errors are raised before any `.grad` changes. Finally it releases everything.
    """

    def __init__(
        self,
        encodings: list[Encoding],
        several: bool,
        number: int,
        group: Any,
        memory: StepMemory,
        gradients_on_host: bool | None,
    ) -> None:
        """Save the context that the second pass needs.

        Args:
            encodings: before their first pass.
            several: whether there is one for each batch.
            number: of the step, for messages.
            group, gradients_on_host: as in GradientCache.
            memory: of the steps so far; decides where gradients of features wait.
        """
        self.encodings = encodings
        self.inputs: list[Tensor] = []
        self.pending: PendingLoss | None = None
        self._several = several
        self._number = number
        self._group = group
        self._memory = memory
        self._gradients_on_host = gradients_on_host
        self._once = all(encoding.once for encoding in encodings)
        self._devices = set().union(*(encoding.devices for encoding in encodings), cuda_devices())
        modules = [module for encoding in encodings for module in encoding.modules]
        self._context = ForwardContext(dict.fromkeys(modules), self._devices)
        self._aliases: dict[Tensor, Tensor] = {}
        self._loss_leaves: list[Tensor] = []
        self._loss: Tensor | None = None
        self._begun = False

    def first_pass(
        self,
        loss: Callable[..., Tensor],
        loss_kwargs: Mapping[str, Any],
        keeps: bool,
        check: PassesCheck | None,
    ) -> Tensor:
        """Encode, and return the loss with the node of the second pass.

        Args:
            loss: the function.
            loss_kwargs: the caller's keywords.
            keeps: whether graphs may be kept on some rank.
            check: compares features of both passes; None: they are not compared.
        """
        self._keeps = keeps and len(global_ranks(self._group)) > 1
        try:
            # As below: weights that are cached without a graph pass no gradient on.
            with self._agreed_memory("first pass"), parametrizations_not_cached():
                for encoding in self.encodings:
                    encoding.forward(check=None if self._once else check)
            self._check_forward_passes()
            # Autocast caches casts of weights; those made without a graph pass no gradient on.
            torch.clear_autocast_cache()
            value = self._compute_loss(loss, loss_kwargs)
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
        all_gather_numbers(self._call("backward pass"), [], self._group)
        assert self.pending is not None
        self.pending.backpropagated()
        self._begun = True
        sums = GradientSums(self.inputs, accumulated)
        random_state = RandomState(self._devices)
        try:
            with self._context.restored(), torch.enable_grad():
                torch.clear_autocast_cache()  # casts from the first pass have no graph
                self._backward_of_loss(upstream, sums)
                self._encode_again(sums)
            results = sums.results()
            for tensor, gradient in zip(self.inputs, results, strict=True):
                if gradient is None and tensor.is_leaf:
                    call_hooks_only_with_gradient(tensor)
            return results or [None]
        finally:
            random_state.restore()
            self._release()

    def _call(self, part: str) -> str:
        return f"GradientCache, {part} of step {self._number}"

    def _agreed_memory(self, part: str) -> contextlib.AbstractContextManager[None]:
        """If activations are kept, raise an error on all ranks when memory runs out on one."""
        if self._keeps:
            return out_of_memory_on_all_ranks(self._call(part), self._group)
        return contextlib.nullcontext()

    def _check_forward_passes(self) -> None:
        """Check, after the first pass, that forward passes have changed no tensor.

        Raises:
            RuntimeError: one has, as a model does that updates a moving average of its weights.
        """
        for encoding in self.encodings:
            changed = encoding.changed_parameter()
            if changed:
                raise RuntimeError(
                    f"GradientCache: a forward pass changed {changed} of {encoding.name}. There "
                    "are several forward passes for a batch, so it would change several times: "
                    "leave that out of the encoders' forward, and do it once for each step, such "
                    "as the update of a moving average of weights before the step is called"
                )
            changed = encoding.changed()
            if changed and encoding.requires_grad:  # else its rows are not used again
                raise RuntimeError(
                    f"GradientCache: a forward pass changed {changed} of {encoding.name} in place, "
                    "which the second pass needs as it was: let the encoder work on a copy"
                )

    def _compute_loss(self, function: Callable[..., Tensor], keywords: Mapping[str, Any]) -> Tensor:
        """Compute the loss of the cached outputs, shape (), and keep its graph."""
        args, kwargs = loss_arguments(self.encodings, self._several)
        detached = {name: self._detached(value) for name, value in keywords.items()}
        loss = checked_loss(function(*args, **kwargs, **detached))
        if not loss.requires_grad:
            raise ValueError("loss: the value returned depends on nothing that requires a gradient")
        features = {id(t): t for encoding in self.encodings for t in _trained(encoding)}
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
        self._loss = loss.reshape(())
        return self._loss

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

    def _check(self, all_accumulated: bool) -> None:
        if self._begun:
            raise RuntimeError(
                "GradientCache: expected one backward pass of a loss, got a second one; call the "
                "step again, or add losses up before loss.backward()"
            )
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
            changed = encoding.requires_grad and encoding.changed()
            if changed:
                raise RuntimeError(
                    f"GradientCache: {changed} of {encoding.name} was changed in place after the "
                    "step was called; call loss.backward() before optimizer.step(), and leave "
                    "batches as they are until then"
                )

    def _backward_of_loss(self, upstream: Tensor, sums: GradientSums) -> None:
        """Backpropagate the loss to the cached features, and free those."""
        loss, self._loss = self._loss, None
        assert loss is not None
        wrapped = {id(t) for e in self.encodings if e.wrappers for t in e.inputs}
        # DDP and FSDP2 reduce these together with the second pass's additions to .grad.
        reduced = [leaf for leaf in self._loss_leaves if id(leaf) in wrapped]
        others = [leaf for leaf in self._loss_leaves if id(leaf) not in wrapped]
        features = [tensor for encoding in self.encodings for tensor in _trained(encoding)]
        wanted = [*reduced, *self._aliases.values(), *features]
        found = iter(sums.add_from([loss], [upstream.to(loss).reshape(())], others, wanted))
        del loss, features, wanted
        for leaf in reduced:
            add_to_grad(leaf, next(found))
        for tensor in self._aliases:
            sums.add(tensor, next(found))
        gradients: list[Outputs] = [
            {key: next(found) if _is_trained(t) else None for key, t in e.cached.items()}
            for e in self.encodings
        ]
        del found
        on_host = not self._once and self._wait_on_host(gradients)
        for encoding in self.encodings:
            store = to_host if on_host else lambda gradient: gradient
            encoding.take_gradients(gradients.pop(0), store)

    def _wait_on_host(self, gradients: list[Outputs]) -> bool:
        """Whether gradients of features are to wait on the host for the second pass."""
        if self._gradients_on_host is not None:
            return self._gradients_on_host
        large = [
            gradient
            for encoding, found in zip(self.encodings, gradients, strict=True)
            for key, gradient in found.items()
            if gradient is not None and key in encoding.per_sample
        ]
        modules = (module for encoding in self.encodings for module in encoding.modules)
        graphs = any(encoding.graphs for encoding in self.encodings)
        return not self._memory.fits(large, modules, graphs=graphs)

    def _encode_again(self, sums: GradientSums) -> None:
        if not self._once:
            self._memory.second_pass_begins(self._devices)
            with self._agreed_memory("kept graphs"):  # of all encodings: then the memory is free
                for encoding in self.encodings:
                    encoding.backward_kept(sums)
        encodings = [e for e in self.encodings if self._once or e.has_gradients()]
        for i, encoding in enumerate(encodings):
            later = any(encoding.encoder is other.encoder for other in encodings[i + 1 :])
            encoding.backward(sums, synchronise=not later)
            if not self._once:
                graphs = [size for _, size in sorted(encoding.activations.items())]
                self._memory.measured(encoding.name, graphs)

    def _release(self) -> None:
        """Free batches and graphs, though the caller may keep the loss."""
        for encoding in self.encodings:  # a traceback may refer to them
            encoding.release()
        self.encodings, self.inputs, self._loss_leaves = [], [], []
        self._aliases = {}
        self._loss = None


def loss_arguments(encodings: list[Encoding], several: bool) -> tuple[list[Any], dict[Any, Any]]:
    """The loss's positional and keyword arguments; `several`: an encoding for each batch."""
    if not several:
        return encodings[0].form.arguments(encodings[0].cached)
    return [single(encoding.name, encoding.cached) for encoding in encodings], {}


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


def _trained(encoding: Encoding) -> list[Tensor]:
    """The cached outputs that get a gradient."""
    return [t for t in encoding.cached.values() if t is not None and t.requires_grad]


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
