"""How the cached losses for sentence-transformers encode their texts.

Texts are encoded in order of length, so that the library's mini-batches have little padding. The
activations of some mini-batches may wait for the backward pass.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from megabatch.gradient_cache.by_length import full_micro_batches
from megabatch.models.padding import MASKED_KINDS

#: Modules of sentence-transformers whose result for a text does not depend on its padding, after
#: a transformer that masks padding.
_ROW_BY_ROW = frozenset(
    {"Transformer", "Pooling", "Dense", "LayerNorm", "Dropout", "Normalize", "WeightedLayerPooling"}
    | {"MultiVectorMask"}
)


class Cached:
    """For the library's cached losses: each column of texts is encoded in order of their lengths.

    The library cuts a batch into mini-batches in the batch's order, and each of them to its longest
    text (from release 6.0 on). In a large batch nearly every mini-batch has a long text; sorted,
    most have short ones alone. The longest come first, so the first mini-batch needs the most
    memory. `mini_batch_num_tokens` then counts padding as well, so mini-batches are even, and their
    shapes return from step to step. The loss gets the embeddings in the batch's own order. With
    `kept_mini_batches`, so many of a column are encoded once, with a graph.
    """

    model: Any
    mini_batch_num_tokens: Any
    _places: Sequence[Tensor | None] = ()  # of the batch's rows among the sorted ones, by column
    _sorted_masks: Sequence[Tensor] = ()  # of columns whose mini-batches are divided here

    def __init__(
        self,
        *args: Any,
        sort_by_length: bool | None = None,
        kept_mini_batches: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        if not isinstance(kept_mini_batches, int) or kept_mini_batches < 0:
            raise ValueError(
                f"kept_mini_batches: expected an integer from 0 on, got {kept_mini_batches!r}"
            )
        if kept_mini_batches and hasattr(self, "guide"):
            # The library's passes with gradients leave out its embeddings.
            raise ValueError(
                f"kept_mini_batches: expected 0 with a guide model, got {kept_mini_batches}"
            )
        encode: Any = super().embed_minibatch_iter  # type: ignore[misc]
        if kept_mini_batches and "ranges" not in inspect.signature(encode).parameters:
            raise ValueError(
                f"kept_mini_batches: expected 0 with sentence-transformers "
                f"{version('sentence-transformers')}, got {kept_mini_batches}: this release does "
                "not say which mini-batches a second pass has"
            )
        self.kept_mini_batches = kept_mini_batches
        encoders = self.model, getattr(self, "guide", self.model)
        masked = all(map(_masks_padding, encoders))
        self.sort_by_length = masked if sort_by_length is None else sort_by_length

    def forward(
        self, sentence_features: Iterable[dict[str, Any]], labels: Tensor | None = None
    ) -> Tensor:
        """The loss of tokenized texts, one dictionary for each column; labels are not used."""
        columns, self._are_in_batch_order = list(sentence_features), False
        if self.sort_by_length and columns:
            columns, self._places = map(list, zip(*map(sorted_by_length, columns), strict=True))
            if getattr(self, "mini_batch_num_tokens", None):
                pairs = zip(columns, self._places, strict=True)
                self._sorted_masks = [c["attention_mask"] for c, p in pairs if p is not None]
        try:
            loss: Tensor = super().forward(columns, labels)  # type: ignore[misc]
        finally:
            self._places = self._sorted_masks = ()
        if not self._are_in_batch_order:  # the library's own loss would pair sorted texts
            raise RuntimeError(
                f"{type(self).__name__}: this release of sentence-transformers computes the loss "
                "elsewhere than in calculate_loss, which is replaced here; 5.4 to 6.2 were tested"
            )
        return loss

    def embed_minibatch_iter(self, *args: Any, **given: Any) -> Iterator[Any]:
        """The library's generator of the embeddings of a column's mini-batches."""
        ranges, mask = given.get("ranges"), given.get("sentence_feature", {}).get("attention_mask")
        if ranges and any(mask is each for each in self._sorted_masks):
            widths = mask.sum(1).clamp(min=1).unique_consecutive(return_counts=True)
            runs = [*zip(*(each.tolist() for each in widths), strict=True)]
            parts = full_micro_batches(runs, self.mini_batch_num_tokens)
            # In place, for the second pass as well.
            ranges[:] = [(part.start, part.stop) for part in parts]
        encode: Any = super().embed_minibatch_iter  # type: ignore[misc]
        if not (self.kept_mini_batches and torch.is_grad_enabled()):
            return encode(*args, **given)
        return (self._first if given.get("random_states") is None else _second)(encode, **given)

    def _first(self, encode: Any, ranges: Sequence[Any], **given: Any) -> Iterator[Any]:
        """The items of a first pass; those with a graph wait in the place of random states."""
        count = min(self.kept_mini_batches, len(ranges))
        without_sync: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        model = getattr(self.model, "_orig_mod", self.model)
        if isinstance(model, DistributedDataParallel):
            if model.static_graph:
                raise ValueError(
                    "kept_mini_batches: expected 0 with DDP's static graph, got "
                    f"{self.kept_mini_batches}"
                )
            # Gradients are averaged with the last mini-batch, which DDP prepares in its second
            # forward pass.
            count, without_sync = min(count, len(ranges) - 1), model.no_sync()
        with without_sync:
            for item in encode(ranges=ranges[:count], **{**given, "with_grad": True}):
                yield (*item[:-1], _Kept(item))
        yield from encode(ranges=ranges[count:], **given)

    def _in_batch_order(self, columns: Iterable[Tensor]) -> list[Tensor]:
        """Embeddings or masks (rows, ...) of whole columns, from those of the sorted texts."""
        self._are_in_batch_order = True
        columns = list(columns)
        places = self._places or (None,) * len(columns)
        return [
            column if place is None else column.index_select(0, place)
            for column, place in zip(columns, places, strict=True)
        ]


@dataclass(frozen=True)
class _Kept:
    """A mini-batch's embeddings with their graph, and what the library gives beside them."""

    item: tuple[Any, ...]


def _second(
    encode: Any, ranges: Sequence[Any], random_states: list[Any], **given: Any
) -> Iterator[Any]:
    """The items of a second pass, the first ones from the first pass."""
    count = sum(isinstance(state, _Kept) for state in random_states)
    for i in range(count):
        item = random_states[i].item
        random_states[i] = item[-1]  # so the graph goes, and another pass would encode it again
        yield item
    yield from encode(ranges=ranges[count:], random_states=random_states[count:], **given)


def sorted_by_length(features: dict[str, Any]) -> tuple[dict[str, Any], Tensor | None]:
    """A column's tensors with the longest texts first, and each text's place among them.

    Inputs that are not one row of tokens for each text stay as they are: flattened ones, images.
    """
    mask = features.get("attention_mask")
    tensors = [value for value in features.values() if isinstance(value, Tensor)]
    if mask is None or any(t.ndim not in (1, 2) or len(t) != len(mask) for t in tensors):
        return features, None
    order = mask.sum(1).argsort(descending=True, stable=True)
    rows = {k: v[order] if isinstance(v, Tensor) else v for k, v in features.items()}
    return rows, order.argsort()


def _masks_padding(model: Any) -> bool:
    """Whether embeddings of a sentence encoder are known not to depend on padding."""
    modules = list(model) if isinstance(model, torch.nn.Sequential) else []
    config = getattr(getattr(modules[0], "auto_model", None), "config", None) if modules else None
    masked = getattr(config, "model_type", None) in MASKED_KINDS
    return masked and all(type(m).__name__ in _ROW_BY_ROW for m in modules)
