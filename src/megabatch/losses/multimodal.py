"""Several modalities, pair by pair (as in ImageBind, Girdhar et al. 2023, arXiv 2305.05665)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megabatch.losses.arguments import check_factors, check_pairs
from megabatch.losses.base import ContrastiveLoss, keep_in_graph
from megabatch.losses.clip import ClipLoss

Pair = tuple[str, str]
Scale = float | Tensor


class MultiModalLoss(ContrastiveLoss):
    """The weighted sum of a two-sided loss over chosen pairs of modalities.

    A sample that lacks one modality of a pair takes no part in that pair, neither as an anchor nor
    as a negative; a pair that no sample has counts as 0.

    Args:
        pairs: pairs of names of the modalities to compare with each other.
        weights: a non-negative number for each pair; 1 each by default.
        loss: for each pair called as `loss(x, y, logit_scale, logit_bias, weights=ones)`:
            `ClipLoss` (the default) or `SigLipLoss`. It gets weights of 1 because a weighted mean
            over no rows is 0, whereas an unweighted one is an error.
        normalize: see `ContrastiveLoss`.
        group: the default loss's, see `ContrastiveLoss`; a loss that you pass has its own.
    """

    def __init__(
        self,
        pairs: Sequence[Pair],
        *,
        weights: Sequence[float] | None = None,
        loss: Callable[..., Any] | None = None,
        normalize: bool = False,
        group: object = None,
    ) -> None:
        super().__init__(normalize=normalize, group=group)
        self.pairs = tuple(_as_pair(pair) for pair in pairs)
        if not self.pairs:
            raise ValueError("pairs: expected at least one, got none")
        self._names = list(dict.fromkeys(name for pair in self.pairs for name in pair))
        self.weights = check_factors("weights", weights, len(self.pairs), "pair")
        if loss is not None and not callable(loss):
            raise TypeError(f"loss: expected a callable, got {type(loss).__name__}")
        self.loss = ClipLoss(group=group) if loss is None else loss

    def forward(
        self,
        features: Mapping[str, Tensor | None],
        logit_scale: Scale | Mapping[Pair, Scale],
        logit_bias: Scale | Mapping[Pair, Scale] | None = None,
        *,
        present: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        """The weighted sum over pairs; see `ContrastiveLoss`.

        Args:
            features: (b, d) for each modality, row i belongs to sample i; None if no sample has the
                modality. If samples of some processes have it, the others pass a tensor
                masked by `present`, as all must agree on what needs a gradient. A modality that no
                pair names is not used, and its gradient is 0.
            logit_scale: 1 / temperature, exponentiated already: one for all pairs, or a mapping
                with one for each.
            logit_bias: likewise.
            present: for some modalities a bool tensor (b,), False if a sample lacks the modality;
                the values of that row of the features, even NaN, are ignored. Selecting rows
                synchronises with the masks' device; masks on the CPU avoid this for a GPU.
        """
        present = {} if present is None else present
        like = self._check(features, present)
        total: Any = None
        for pair, weight in zip(self.pairs, self.weights, strict=True):
            x, y = (features[name] for name in pair)
            masks = [present[name] for name in pair if name in present]
            if x is None or y is None:
                # No rows, of the same width and dtype, and with the same need for a gradient.
                x, y = (like[:0] if t is None else t[:0] for t in (x, y))
            elif masks:
                both = masks[0] if len(masks) == 1 else masks[0] & masks[1].to(masks[0].device)
                index = both.nonzero().squeeze(1).to(x.device, non_blocking=True)
                x, y = x.index_select(0, index), y.index_select(0, index)
            if self.normalize:
                x, y = self._operand(x), self._operand(y)
            loss = self.loss(
                x,
                y,
                _of(pair, logit_scale, "logit_scale"),
                _of(pair, logit_bias, "logit_bias"),
                weights=x.new_ones(x.shape[0], dtype=torch.float32),
            )
            total = weight * loss if total is None else total + weight * loss
        return keep_in_graph(total, *(f for name, f in features.items() if name not in self._names))

    def _check(self, features: Any, present: Any) -> Tensor:
        """Check that all features and masks match; returns one of the features."""
        for name, mapping in (("features", features), ("present", present)):
            if not isinstance(mapping, Mapping):
                raise TypeError(f"{name}: expected a mapping, got {type(mapping).__name__}")
        for name in self._names:
            if name not in features:
                raise ValueError(
                    f"features: expected {name!r}, as pairs name it, got {sorted(features)}"
                )
        given = [name for name in self._names if features[name] is not None]
        if not given:
            raise ValueError("features: expected at least one modality, got None for all")
        like: Tensor = features[given[0]]
        for name in given:
            names = (f"features[{given[0]!r}]", f"features[{name!r}]")
            check_pairs(like, features[name], names)
        for name, mask in present.items():
            if name not in features:
                raise ValueError(f"present: expected names among {sorted(features)}, got {name!r}")
            label, rows = f"present[{name!r}]", like.shape[0]
            if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
                came = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
                raise TypeError(f"{label}: expected a bool tensor, got {came}")
            if tuple(mask.shape) != (rows,):
                raise ValueError(f"{label}: expected shape ({rows},), got {tuple(mask.shape)}")
        return like


def _as_pair(pair: Any) -> Pair:
    """Check a pair of names of different modalities; a string of two letters is none."""
    if isinstance(pair, str) or not isinstance(pair, Sequence):
        raise TypeError(f"pairs: expected pairs of names, got {pair!r}")
    if len(pair) != 2 or not all(isinstance(name, str) for name in pair) or pair[0] == pair[1]:
        raise ValueError(f"pairs: expected two names of different modalities each, got {pair!r}")
    return pair[0], pair[1]


def _of(pair: Pair, value: Any, name: str) -> Any:
    """The scale or bias of a pair."""
    if not isinstance(value, Mapping):
        return value
    if pair not in value:
        raise ValueError(f"{name}: expected one for the pair {pair!r}, got {list(value)}")
    return value[pair]
