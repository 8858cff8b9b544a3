"""Sums of the micro-batches' gradients, until they leave the step's node together."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from megabatch.gradient_cache.autograd import put_hooks_back, set_hooks_aside
from megabatch.torch_internals import tensor_hooks


class GradientSums:
    """For each of a node's inputs, the sum of its gradients so far; a context manager.

    A hook takes a leaf's gradient as soon as it is computed, one parameter at a time, as
    `.backward()` would add it to `.grad`: a micro-batch's whole gradient is never in memory
    together with the sum. The leaf's own hooks see only the sum, when it leaves the node.

    If `.grad` already has a gradient, as under gradient accumulation, a second tensor of that size
    would raise the peak. Gradients are then added to `.grad` (`in_place`), and the node returns a
    zero that takes the memory of one number.
    """

    def __init__(self, inputs: Sequence[Tensor], in_place: Sequence[bool]) -> None:
        """`in_place`: for each input, whether sums may be added to `.grad`."""
        self._inputs = inputs
        self._indices = {id(tensor): i for i, tensor in enumerate(inputs)}
        self._sums: list[Tensor | None] = [
            tensor.grad if allowed else None
            for tensor, allowed in zip(inputs, in_place, strict=True)
        ]
        self._in_place = in_place
        self._reached = [False] * len(inputs)
        self._zeros: dict[tuple[torch.dtype, torch.device], Tensor] = {}
        self._handles: dict[int, RemovableHandle] = {}
        self._taking = False

    def __contains__(self, tensor: Tensor) -> bool:
        """Whether the tensor is one of the inputs."""
        return id(tensor) in self._indices

    def __enter__(self) -> GradientSums:
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()

    def add_from(
        self,
        outputs: Sequence[Tensor],
        upstream: Sequence[Tensor],
        tensors: Sequence[Tensor],
        others: Sequence[Tensor] = (),
    ) -> list[Tensor | None]:
        """Backpropagate through the graph of `outputs`, and add the gradients of `tensors`.

        Returns:
            The gradients of `others`, None for those that got none.
        """
        tensors = [tensor for tensor in tensors if tensor.requires_grad]
        with self._taking_from(tensors):
            gradients = torch.autograd.grad(
                outputs, [*tensors, *others], upstream, allow_unused=True
            )
        for tensor, gradient in zip(tensors, gradients, strict=False):
            if gradient is not None and not tensor.is_leaf:
                self.add(tensor, gradient)
        return list(gradients[len(tensors) :])

    def add(self, tensor: Tensor, gradient: Tensor) -> None:
        """Add a gradient of one of the inputs."""
        i = self._indices[id(tensor)]
        self._reached[i] = True
        total = self._sums[i]
        if total is None:
            # It may be shared with another parameter's gradient (of a + b), or be expanded.
            self._sums[i] = _copy(gradient, tensor)
        elif _plain(total):
            total.add_(gradient)
        else:
            self._sums[i] = total + gradient

    def results(self) -> list[Tensor | None]:
        """Return the node's gradient for each input; None for those that got none."""
        sums, self._sums = self._sums, []
        for i, total in enumerate(sums):
            if not self._reached[i]:
                sums[i] = None
            elif self._in_place[i] and total is not None:
                sums[i] = self._zero(total)
        return sums

    def _take(self, i: int, gradient: Tensor) -> Tensor | None:
        if not self._taking:
            return None
        self.add(self._inputs[i], gradient)
        return self._zero(gradient) if _plain(gradient) else None

    @contextlib.contextmanager
    def _taking_from(self, tensors: Sequence[Tensor]) -> Iterator[None]:
        """Take the leaves' gradients inside, and call none of their other hooks."""
        leaves = [tensor for tensor in tensors if tensor.is_leaf]
        aside = [set_hooks_aside(leaf, but=self._hook(leaf).id) for leaf in leaves]
        self._taking = True
        try:
            yield
        finally:
            self._taking = False
            for leaf, hooks in zip(leaves, aside, strict=True):
                put_hooks_back(leaf, hooks)

    def _hook(self, leaf: Tensor) -> RemovableHandle:
        i = self._indices[id(leaf)]
        if i not in self._handles:
            self._handles[i] = leaf.register_hook(functools.partial(self._take, i))
        return self._handles[i]

    def _zero(self, like: Tensor) -> Tensor:
        key = like.dtype, like.device
        if key not in self._zeros:
            self._zeros[key] = torch.zeros((), dtype=like.dtype, device=like.device)
        return self._zeros[key].expand(like.shape)


def may_add_in_place(tensor: Tensor) -> bool:
    """Whether gradients of this leaf may be added to its `.grad`, and zero be returned for it.

    Not if the leaf has a hook, which would see the zero.
    """
    gradient = tensor.grad if tensor.is_leaf else None
    hooks = tensor_hooks(tensor)
    return gradient is not None and _plain(gradient) and not gradient.requires_grad and not hooks


def _plain(tensor: Tensor) -> bool:
    """Whether the tensor is neither sparse nor of a subclass such as DTensor."""
    return type(tensor) is Tensor and tensor.layout is torch.strided


def _copy(gradient: Tensor, like: Tensor) -> Tensor:
    """Copy the gradient in the layout that `.grad` should have, so that autograd takes it over."""
    if not (_plain(gradient) and like.layout is torch.strided):
        return gradient.clone()
    return torch.empty_like(like, dtype=gradient.dtype).copy_(gradient)
