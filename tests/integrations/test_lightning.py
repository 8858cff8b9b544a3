"""A LightningModule with the mixin trains as without gradient caching, alone and on two ranks."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from megabatch.integrations.lightning import MegabatchMixin
from megabatch.losses import ClipLoss
from tests.integrations.training import assert_weights_equal, descend, weights_of
from tests.similarity.distributed.processes import World

lightning = pytest.importorskip("lightning")

from lightning.fabric.plugins.environments import TorchElasticEnvironment  # noqa: E402
from lightning.pytorch.strategies import ModelParallelStrategy  # noqa: E402

WIDTH, DIMS, SAMPLES, BATCH = 5, 4, 32, 4


class Pairs(MegabatchMixin, lightning.LightningModule):  # type: ignore[name-defined, misc]
    micro_batch_size = 3

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.x, self.y = (
            nn.Sequential(nn.Linear(WIDTH, 8), nn.GELU(), nn.Linear(8, DIMS)) for _ in range(2)
        )
        self.log_scale = nn.Parameter(torch.tensor([1.0]))
        self.clip = ClipLoss()
        self.logged: list[Tensor] = []

    def encoders(self) -> tuple[nn.Module, nn.Module]:
        return self.x, self.y

    def contrastive_loss(self, x: Tensor, y: Tensor) -> Tensor:
        loss: Tensor = self.clip(F.normalize(x), F.normalize(y), self.log_scale.exp())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)


class Uncached(Pairs):
    def cached_loss(self, *batches: Any, **inputs: Any) -> Tensor:
        return self.contrastive_loss(self.x(batches[0]), self.y(batches[1]))


class Sharded(Pairs):
    def configure_model(self) -> None:
        for tower in (self.x, self.y):
            fully_shard(tower, mesh=self.device_mesh["data_parallel"])


def samples() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(SAMPLES, WIDTH, generator=generator) for _ in range(2)]


def trained(module: Any, folder: Path, **options: Any) -> Any:
    """The Trainer after an epoch with accumulation over two batches, clipping and validation."""
    trainer = lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        accumulate_grad_batches=2,
        num_sanity_val_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        use_distributed_sampler=False,
        **{"gradient_clip_val": 0.3, "devices": 1, **options},
    )
    data = TensorDataset(*samples())
    # Lightning's own sampler would shuffle.
    sampler = DistributedSampler(data, shuffle=False) if dist.is_initialized() else None
    batches = DataLoader(data, BATCH, sampler=sampler)
    trainer.fit(module, batches, batches)
    return trainer


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_trains_as_without_a_cache(precision: Any, tmp_path: Path) -> None:
    cached, plain = Pairs(), Uncached()
    logged = [trained(m, tmp_path, precision=precision).callback_metrics for m in (cached, plain)]
    assert logged[0].keys() == logged[1].keys() == {"train_loss", "val_loss"}
    if precision == "32-true":
        assert_weights_equal(cached, plain, weights_of(Pairs()))
        torch.testing.assert_close(logged[0], logged[1], rtol=1e-5, atol=1e-6)
    for found, expected in zip(cached.parameters(), plain.parameters(), strict=True):
        assert (found - expected).norm() < 0.02 * expected.norm()


def test_a_single_encoder_takes_a_mapping() -> None:
    class One(Pairs):
        def encoders(self) -> Any:
            return self.both

        def both(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
            return {"x": self.x(batch["images"]), "y": self.y(batch["texts"])}

    x, y = samples()
    one, plain = One(), Uncached()
    loss = one.training_step({"images": x, "texts": y}, 0)
    expected = plain.training_step((x, y), 0)
    torch.testing.assert_close(loss, expected)
    loss.backward()
    expected.backward()
    for found, other in zip(one.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found.grad, other.grad)


def test_the_micro_batch_size_may_change_between_steps() -> None:
    """As Lightning's `BatchSizeFinder` changes it."""
    module, sizes = Pairs(), []
    module.cached_loss(*samples())
    module.x.register_forward_hook(lambda _, args, __: sizes.append(len(args[0])))
    module.micro_batch_size = 8
    module.cached_loss(*samples())
    assert set(sizes) == {8}


def test_texts_by_tokens() -> None:
    class Texts(Pairs):
        micro_batch_tokens = 20

    module, sizes = Texts(), []
    module.x = module.y = nn.EmbeddingBag(9, DIMS)  # type: ignore[assignment]
    module.x.register_forward_hook(lambda _, args, __: sizes.append(len(args[0])))
    module.cached_loss(torch.randint(9, (5, 8)), torch.randint(9, (5, 6)))
    assert sizes == [2, 2, 1, 3, 2]


@pytest.mark.parametrize("name", ["DeepSpeedStrategy", "FSDPStrategy", "tensor_parallel_size"])
def test_refuses_strategies(name: str) -> None:
    strategy = type(name, (), {})()
    if name == "tensor_parallel_size":
        size = types.SimpleNamespace(size=lambda: 2)
        strategy.device_mesh = {"tensor_parallel": size}
        assert isinstance(ModelParallelStrategy.device_mesh, property)
    else:
        assert hasattr(lightning.pytorch.strategies, name)
    module = Pairs()
    module.cached_loss(*samples())  # without a Trainer
    module.trainer = types.SimpleNamespace(strategy=strategy)
    module.micro_batch_size = 1
    with pytest.raises(ValueError, match=name):
        module.cached_loss(*samples())


def test_refuses_missing_methods_and_manual_optimisation() -> None:
    module = Pairs()
    module.automatic_optimization = False
    with pytest.raises(ValueError, match="automatic_optimization: expected True"):
        module.training_step(samples(), 0)
    with pytest.raises(NotImplementedError, match="encoders: MegabatchMixin does not define them"):
        MegabatchMixin().cached_loss()


def reference(clip: float) -> Pairs:
    """Plain SGD on the joined batches of both ranks, which are consecutive rows."""
    module = Uncached()
    module.clip = ClipLoss(group="local")
    descend(module, lambda i: module.cached_loss(*joined()[i]), 1.0, clip)
    return module


def joined() -> list[tuple[Tensor, ...]]:
    return [*zip(*(side.split(2 * BATCH) for side in samples()), strict=True)]


def on_two_under_ddp(_: World) -> None:
    """Train as one process with the batches of both ranks."""
    for strategy in ("ddp", "ddp_find_unused_parameters_true"):
        module = Pairs()
        trainer = trained(
            module, Path("unused"), devices=2, strategy=strategy,
            plugins=[TorchElasticEnvironment()],
        )  # fmt: skip
        assert trainer.world_size == 2
        expected = reference(0.3)
        assert_weights_equal(module, expected, weights_of(Pairs()))
        with torch.no_grad():
            losses = [expected.cached_loss(*batch) for batch in joined()]
        found = trainer.callback_metrics["val_loss"]
        torch.testing.assert_close(found, torch.stack(losses).mean(), rtol=1e-4, atol=1e-5)


def on_two_sharded(_: World) -> None:
    module = Sharded()
    trained(
        module, Path("unused"), devices=2, gradient_clip_val=None,
        strategy=ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
        plugins=[TorchElasticEnvironment()],
    )  # fmt: skip
    for tower in (module.x, module.y):  # validation leaves them unsharded
        tower.reshard()
    assert hasattr(module.x[0].weight, "full_tensor")
    assert_weights_equal(module, reference(1e6), weights_of(Pairs()))
