"""The loss of a batch by gradient caching over two towers, one of which may be locked."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from megabatch.data import Batch
from megabatch.gradient_cache import GradientCache, SortedByLength
from megabatch.gradient_cache.feed import Feed
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
        micro_batch_tokens: if not None, the most tokens of texts by length, whatever their rows.
        device: where micro-batches are copied to, the next one during computation on the current.
        locked: the towers that are locked as a whole. Default: those of the module.
        lengths: of `Towers`, for the towers that are to encode texts or patches in order of their
            lengths and without most of their padding; the others get batches as they are.
        after_loss: called when there are features' gradients, before the second pass.
        options: of GradientCache: `group`, `feature_dtype`.
    """

    def __init__(
        self,
        module: nn.Module,
        objective: nn.Module,
        micro_batch_size: int,
        *,
        micro_batch_tokens: int | None = None,
        device: torch.device,
        locked: frozenset[Tower] | None = None,
        lengths: Mapping[Tower, Lengths] | None = None,
        after_loss: Callable[[], None] | None = None,
        **options: Any,
    ) -> None:
        found = locked_towers(module) if locked is None else locked
        if "negatives" in getattr(objective, "takes", ()):
            module = WithNegatives(module)
        self.module = module
        self.micro_batch_size, self.micro_batch_tokens = micro_batch_size, micro_batch_tokens
        self.device = device
        self._objective = objective
        self._lengths = lengths or {}
        self._after_loss = after_loss
        self._images: Any = None
        self.locked: Tower | None = next(iter(found), None)
        if self.locked is not None:
            module = OneTower(module, "text" if self.locked == "image" else "image")
        options |= {"micro_batch_tokens": micro_batch_tokens, "device": device}
        self.cache = GradientCache(module, self._loss, micro_batch_size, **options)

    def __call__(self, batch: Batch, ids: Tensor | None = None) -> Tensor:
        """The loss, shape (). `ids`: (b,) if the objective takes them, else None."""
        constants = {} if ids is None else {"ids": ids}
        batches: dict[Tower, Any] = {"image": batch.images, "text": batch.texts}
        self._images = batch.images
        try:
            if self.locked is not None:
                features = self._locked_features(self.locked, batches.pop(self.locked))
                constants[f"{self.locked}_features"] = features
            return self.cache(*(self._sorted(*each) for each in batches.items()), **constants)
        finally:
            self._images = None  # the cache refers to `_loss`, and must not keep images alive

    def sorted_towers(self, batch: Batch) -> dict[str, SortedByLength]:
        """The batches of the towers that take them by length, by tower."""
        named: dict[Tower, Any] = {"image": batch.images, "text": batch.texts}
        return {tower: self._sorted(tower, named[tower]) for tower in self._lengths}

    def _sorted(self, tower: Tower, inputs: Any) -> Any:
        """A batch for a tower that takes texts or patches without padding; others as they are."""
        if tower not in self._lengths:
            return inputs
        lengths, outputs = self._lengths[tower], [f"{tower}_features"]
        if isinstance(inputs, Mapping) or inputs.ndim == 2:
            return SortedByLength(inputs, lengths(inputs), outputs=outputs)
        longest = torch.stack([lengths(texts) for texts in inputs.unbind(2)]).amax(0)
        return SortedByLength(inputs, longest, outputs=[*outputs, "negative_features"])

    def _loss(self, **given: Any) -> Tensor:
        """The objective without the pairs whose image turned out damaged in the first pass."""
        if (after_loss := self._after_loss) is not None:
            for value in given.values():
                if isinstance(value, Tensor) and value.requires_grad:
                    value.register_hook(lambda _: after_loss())
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
    def _locked_features(self, tower: Tower, inputs: Any) -> Tensor:
        """The locked tower's features of a whole batch, (b, d) on the device."""
        encode, name = OneTower(self.module, tower), f"{tower}_features"
        feed = Feed("the locked tower", {name: self._sorted(tower, inputs)}, device=self.device)
        divided = feed.divided(self.micro_batch_size, self.micro_batch_tokens)
        with contextlib.closing(feed(divided)) as parts:
            features = torch.cat([encode(part)[name] for part, _ in parts])
        _, texts = feed.sorted_by(name)
        return features if texts is None else texts.in_batch_order(features)


class WithNegatives(nn.Module):
    """Towers whose texts come with hard negatives, which go through the text tower with them.

    `module(images, texts)` takes texts (m, context, 1 + k), each pair's own and then its negatives,
    and also returns `negative_features` (m, k, d); if a text has a feature of each token,
    (m, length, k, d), as GradientCache joins micro-batches of different lengths.
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
        own, negatives = features[:, 0], features[:, 1:]
        if negatives.dim() == 4:
            negatives = negatives.transpose(1, 2)
        return outputs | {"text_features": own, "negative_features": negatives}


class OneTower(nn.Module):
    """One tower, run through the whole module's forward so that DDP's and FSDP2's hooks apply."""

    def __init__(self, module: nn.Module, tower: Tower) -> None:
        super().__init__()
        self.module = module
        self.tower = tower

    def forward(self, inputs: Any) -> dict[str, Tensor]:
        """The module's outputs without the other tower's features."""
        outputs: dict[str, Tensor | None] = self.module(
            inputs if self.tower == "image" else None, inputs if self.tower == "text" else None
        )
        return {name: value for name, value in outputs.items() if value is not None}
