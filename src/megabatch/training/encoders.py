"""The loss of a batch by gradient caching over two towers, one of which may be locked."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from megabatch.data import Batch
from megabatch.gradient_cache import GradientCache, SortedByLength
from megabatch.gradient_cache.batches import Feed
from megabatch.models.padding import Lengths
from megabatch.models.towers import Tower, locked_towers


class CachedStep:
    """Computes the loss of a batch with cached features; its `backward()` fills `.grad`.

    A tower that is locked as a whole runs once per step, without a graph, one micro-batch at a
    time, before the loss. Its features are constants to the loss, which computes no gradient for
    them. The other tower runs twice, by GradientCache.

    Args:
        module: of `Towers`, on its device, possibly wrapped by DDP or FSDP2.
        objective: called as `Objective`. If it takes negatives, batches have texts (b, context,
            1 + k), each pair's own and then its negatives.
        micro_batch_size: rows that go through a tower at a time, the mean of texts by length.
        device: where micro-batches are copied to, the next one during computation on the current.
        locked: the towers that are locked as a whole, at most one. Default: those of the module.
        lengths: of `Towers`, for the towers that are to encode texts in order of their lengths and
            without most of their padding; the others get batches as they are.
        group, feature_dtype: see GradientCache.
    """

    def __init__(
        self,
        module: nn.Module,
        objective: nn.Module,
        micro_batch_size: int,
        *,
        device: torch.device,
        locked: frozenset[Tower] | None = None,
        lengths: Mapping[Tower, Lengths] | None = None,
        group: Any = None,
        feature_dtype: torch.dtype | None = None,
    ) -> None:
        found = locked_towers(module) if locked is None else locked
        if "negatives" in getattr(objective, "takes", ()):
            module = WithNegatives(module)
        self.module = module
        self.micro_batch_size = micro_batch_size
        self.device = device
        self._objective = objective
        self._lengths = lengths or {}
        self._images: Any = None
        if len(found) > 1:
            raise ValueError("locked: expected at most one tower, got both")
        self.locked: Tower | None = next(iter(found), None)
        if self.locked is None:
            model = module
        else:
            model = OneTower(module, "text" if self.locked == "image" else "image")
        self._cache = GradientCache(
            model,
            self._loss,
            micro_batch_size,
            group=group,
            device=device,
            feature_dtype=feature_dtype,
        )

    def __call__(self, batch: Batch, ids: Tensor | None = None) -> Tensor:
        """The loss, shape (). `ids`: (b,) if the objective takes them, else None."""
        self._images = batch.images
        try:
            return self._step(batch, ids)
        finally:
            self._images = None  # the cache refers to `_loss`, and must not keep images alive

    def keep(self, micro_batches: int) -> None:
        """Encode this many micro-batches once, see `kept_micro_batches` of GradientCache."""
        self._cache.kept_micro_batches = micro_batches

    def sorted_towers(self, batch: Batch) -> dict[str, SortedByLength]:
        """The batches of the towers that take them by length, by tower."""
        named: dict[Tower, Any] = {"image": batch.images, "text": batch.texts}
        return {tower: self._sorted(tower, named[tower]) for tower in self._lengths}

    def longer_texts(self, batch: Batch) -> float:
        """How many times as many tokens a micro-batch of another batch may have, at least 1.

        Its texts are assumed to be similar, but one of them to have all tokens that the model
        takes.
        """
        count = -(-len(batch) // self.micro_batch_size)
        sorted_texts = self.sorted_towers(batch).values() if count else ()
        return max((texts.longer(count) for texts in sorted_texts), default=1.0)

    def _step(self, batch: Batch, ids: Tensor | None) -> Tensor:
        named = {} if ids is None else {"ids": ids}
        if self.locked is None:
            images, texts = self._sorted("image", batch.images), self._sorted("text", batch.texts)
            return self._cache(images, texts, **named)
        frozen, trained = batch.images, self._sorted("text", batch.texts)
        if self.locked == "text":
            frozen, trained = batch.texts, self._sorted("image", batch.images)
        features = self.locked_features(frozen)
        return self._cache(trained, **{f"{self.locked}_features": features}, **named)

    def _sorted(self, tower: Tower, inputs: Any) -> Any:
        """A batch of texts for a tower that takes them without padding; others as they are."""
        if tower not in self._lengths:
            return inputs
        lengths, outputs = self._lengths[tower], [f"{tower}_features"]
        if inputs.ndim == 2:
            return SortedByLength(inputs, lengths(inputs), outputs=outputs)
        longest = torch.stack([lengths(texts) for texts in inputs.unbind(2)]).amax(0)
        return SortedByLength(inputs, longest, outputs=[*outputs, "negative_features"])

    def _loss(self, **given: Any) -> Tensor:
        """The objective without the pairs whose image turned out damaged in the first pass."""
        bad = getattr(self._images, "bad", None)
        if bad:
            good = torch.ones(len(self._images), dtype=torch.bool)
            good[list(bad)] = False
            rows = good.nonzero().flatten()
            for name in ("image_features", "text_features", "negative_features", "ids"):
                if given.get(name) is not None:
                    given[name] = given[name][rows.to(given[name].device)]
        return self._objective(**given)

    @torch.no_grad()
    def locked_features(self, inputs: Any) -> Tensor:
        """The locked tower's features of a whole batch, (b, d) on the device."""
        assert self.locked is not None
        tower, name = OneTower(self.module, self.locked), f"{self.locked}_features"
        batches = {name: self._sorted(self.locked, inputs)}
        feed = Feed("the locked tower", batches, device=self.device)
        with contextlib.closing(feed(feed.divided(self.micro_batch_size))) as parts:
            features = torch.cat([tower(part)[name] for part, _ in parts])
        _, texts = feed.sorted_by(name)
        return features if texts is None else texts.in_batch_order(features)


class WithNegatives(nn.Module):
    """Towers whose texts come with hard negatives, which go through the text tower with them.

    `module(images, texts)` takes texts (m, context, 1 + k), each pair's own and then its negatives,
    and also returns `negative_features` (m, k, d).
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, image: Tensor | None, text: Tensor | None) -> dict[str, Tensor | None]:
        """The module's outputs, and the negatives' features."""
        if text is None:
            return dict(self.module(image, None))
        outputs = dict(self.module(image, text.transpose(1, 2).flatten(0, 1)))
        features = outputs["text_features"].unflatten(0, (len(text), text.shape[2]))
        both = {"text_features": features[:, 0], "negative_features": features[:, 1:]}
        return outputs | both


class OneTower(nn.Module):
    """One tower, run through the whole module's forward so that DDP's and FSDP2's hooks apply."""

    def __init__(self, module: nn.Module, tower: Tower) -> None:
        super().__init__()
        self.module = module
        self.tower = tower

    def forward(self, inputs: Tensor) -> dict[str, Tensor]:
        """The module's outputs without the other tower's features."""
        outputs: dict[str, Tensor | None] = self.module(
            inputs if self.tower == "image" else None, inputs if self.tower == "text" else None
        )
        return {name: value for name, value in outputs.items() if value is not None}
