"""Lightning's automatic optimisation with gradient caching.

    from megabatch.integrations.lightning import MegabatchMixin

    class Pairs(MegabatchMixin, lightning.LightningModule):
        micro_batch_size = 64

        def encoders(self): return self.image, self.text

        def contrastive_loss(self, x, y): return self.clip(x, y, self.log_scale.exp())

It works with both `lightning` and `pytorch_lightning`, so it imports neither. See
docs/integrations/lightning.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from megabatch.gradient_cache import GradientCache

_Encoder = Callable[..., Any]

_REFUSED = {
    "DeepSpeedStrategy": "reduces gradients by hooks of its own in every backward pass, which "
    "cannot be held back until the last micro-batch; use DDPStrategy or ModelParallelStrategy",
    "FSDPStrategy": "(FSDP1) shards parameters again when training_step ends, before the second "
    "pass needs them; use ModelParallelStrategy, with fully_shard in configure_model",
}


class MegabatchMixin:
    """Training and validation steps of a LightningModule, with gradient caching.

    A subclass defines `encoders()` and `contrastive_loss(...)`, and sets `micro_batch_size` or
    `micro_batch_tokens`. The loss is that of the batch of all ranks; Lightning handles
    accumulation, clipping and scaling as for any other loss.
    """

    #: Rows that go through an encoder at once, at least 1; or one number per encoder.
    micro_batch_size: int | Sequence[int] | None = None
    #: The most tokens of texts that go through an encoder at once, likewise; see `GradientCache`.
    micro_batch_tokens: int | Sequence[int] | None = None

    _cache: tuple[Any, GradientCache] | None = None

    def encoders(self) -> _Encoder | Sequence[_Encoder]:
        """One encoder per batch, or one that takes all batches, as for `GradientCache`."""
        raise NotImplementedError(f"encoders: {type(self).__name__} does not define them")

    def contrastive_loss(self, *features: Tensor, **inputs: Any) -> Tensor:
        """The loss of the encoders' outputs for the whole batch; one number."""
        raise NotImplementedError(f"contrastive_loss: {type(self).__name__} does not define it")

    def cached_loss(self, *batches: Any, **inputs: Any) -> Tensor:
        """The loss of a batch, shape (); its `backward()` is the second pass.

        Args:
            *batches: one per encoder, as `GradientCache` takes them.
            **inputs: keywords of `contrastive_loss`.

        Raises:
            ValueError: the Trainer's strategy would not train this loss; the message says why.
        """
        encoders = self.encoders()
        # Since the last step a strategy may have wrapped them, or a tuner changed the size.
        sizes = self.micro_batch_size, self.micro_batch_tokens
        key = (*encoders,) if isinstance(encoders, Sequence) else (encoders,), sizes
        if self._cache is None or self._cache[0] != key:
            _refuse(_strategy_of(self))
            size, tokens = sizes
            loss = self.contrastive_loss
            cache = GradientCache(encoders, loss, size, micro_batch_tokens=tokens)
            self._cache = key, cache
        return self._cache[1](*batches, **inputs)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """The loss of a batch: a sequence with one item per encoder, or a mapping for a single
        encoder.

        Raises:
            ValueError: with manual optimisation, which needs a training step of its own.
        """
        if not self.automatic_optimization:  # type: ignore[attr-defined]
            raise ValueError(
                "automatic_optimization: expected True, got False; for manual optimisation define "
                "a training_step that calls cached_loss()"
            )
        return self._logged("train_loss", batch, sync_dist=False)

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        """As `training_step`, without gradients; the mean over ranks is logged."""
        return self._logged("val_loss", batch, sync_dist=True)

    def _logged(self, name: str, batch: Any, sync_dist: bool) -> Tensor:
        loss = self.cached_loss(*([batch] if isinstance(batch, Mapping) else batch))
        self.log(name, loss.detach(), prog_bar=True, sync_dist=sync_dist)  # type: ignore[attr-defined]
        return loss


def _strategy_of(module: Any) -> Any:
    """The strategy of the Trainer; None without one, as in Fabric."""
    try:
        return module.trainer.strategy if getattr(module, "fabric", None) is None else None
    except (AttributeError, RuntimeError):  # it is no LightningModule, or has no Trainer
        return None


def _refuse(strategy: Any) -> None:
    """Raise an error for strategies that would train something else."""
    for name in (cls.__name__ for cls in type(strategy).__mro__):
        if name in _REFUSED:
            raise ValueError(f"strategy: {name} {_REFUSED[name]}")
    mesh = getattr(strategy, "device_mesh", None)
    size = 1 if mesh is None else mesh["tensor_parallel"].size()
    if size > 1:
        raise ValueError(
            f"strategy: expected tensor_parallel_size=1, got {size}: the ranks of such a group "
            "have the same rows, and the loss would treat them as different pairs; use "
            "ModelParallelStrategy(data_parallel_size=<number of GPUs>, tensor_parallel_size=1)"
        )
