"""Matryoshka representation learning (Kusupati et al. 2022, arXiv 2205.13147) with any loss."""

from __future__ import annotations

import inspect
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from megabatch.losses.arguments import check_factors
from megabatch.losses.base import ContrastiveLoss, unit_rows
from megabatch.similarity.arguments import check_dense


class MatryoshkaLoss(ContrastiveLoss):
    """The weighted sum of one loss over prefixes of the features: their first `dims` numbers.

    The features of a model trained with it can be truncated.

    Args:
        loss: any loss of features, such as those of this library.
        dims: widths of the prefixes, each from 1 to the features' width.
        weights: a non-negative number for each of `dims`; 1 each by default.
        normalize: scale each prefix to unit length, since a prefix of a unit vector is shorter.
            False passes the prefixes to the loss as they are; the loss may normalise them itself.
    """

    def __init__(
        self,
        loss: Callable[..., Any],
        dims: Sequence[int],
        weights: Sequence[float] | None = None,
        *,
        normalize: bool = True,
    ) -> None:
        super().__init__(normalize=normalize)
        if not callable(loss):
            raise TypeError(f"loss: expected a callable, got {type(loss).__name__}")
        dims = tuple(dims)
        if not dims:
            raise ValueError("dims: expected at least one width, got none")
        for dim in dims:
            if isinstance(dim, bool) or not isinstance(dim, numbers.Integral):
                raise TypeError(f"dims: expected integers, got {type(dim).__name__}")
            if dim < 1:
                raise ValueError(f"dims: expected widths of at least 1, got {dim}")
        self.loss, self.dims = loss, tuple(map(int, dims))
        self.weights = check_factors("weights", weights, len(dims), "dim")
        # Arguments that stay whole, by name and by position.
        names = getattr(loss, "whole", ())
        called = inspect.signature(getattr(loss, "forward", loss)).parameters if names else ()
        self._whole = {*names, *(i for i, name in enumerate(called) if name in names)}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The weighted sum of `loss(*args, **kwargs)` over the prefixes.

        All floating-point tensors with two or more dimensions among the arguments, and in mappings
        among them, are features, which are truncated along their last dimension. Everything else
        (scales, ids, labels, weights, masks) reaches the loss as it is, and so do the features of a
        teacher or a guide. If the loss returns a tuple or a mapping of losses, the result is a
        tuple or mapping of their sums.

        Raises:
            ValueError: features are narrower than the largest of `dims`, or there are none.
        """
        given: dict[int | str, Any] = dict(enumerate(args))
        given.update(kwargs)
        to_cut = [key for key in given if key not in self._whole]
        if not any(_has_features(given[key]) for key in to_cut):
            raise ValueError("features: expected at least one tensor of shape (n, d), got none")
        total: Any = None
        for dim, weight in zip(self.dims, self.weights, strict=True):
            prefixes = given | {key: self._cut(key, given[key], dim) for key in to_cut}
            positional = [prefixes[i] for i in range(len(args))]
            loss = self.loss(*positional, **{name: prefixes[name] for name in kwargs})
            total = _plus(total, weight, loss)
        return total

    def _cut(self, key: int | str, value: Any, dim: int) -> Any:
        """The first `dim` numbers of features; an argument's other values as they are."""
        name = f"argument {key}" if isinstance(key, int) else key
        if isinstance(value, Mapping):
            return {k: self._cut(f"{name}[{k!r}]", v, dim) for k, v in value.items()}
        if not _has_features(value):
            return value
        check_dense(name, value)
        if value.shape[-1] < max(self.dims):
            raise ValueError(
                f"{name}: expected width {max(self.dims)} or more, the largest of dims, got "
                f"{value.shape[-1]}"
            )
        prefix = value[..., :dim]
        return unit_rows(prefix, value.dtype) if self.normalize else prefix


def _has_features(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_has_features, value.values()))
    return isinstance(value, Tensor) and value.is_floating_point() and value.dim() >= 2


def _plus(total: Any, weight: float, loss: Any) -> Any:
    """The total so far, None if there is none yet, plus a loss, or a tuple or mapping of losses."""
    if isinstance(loss, Mapping):
        before = total or {}
        return {name: _plus(before.get(name), weight, value) for name, value in loss.items()}
    if isinstance(loss, tuple):
        parts = total or (None,) * len(loss)
        return tuple(_plus(part, weight, value) for part, value in zip(parts, loss, strict=True))
    return weight * loss if total is None else total + weight * loss
