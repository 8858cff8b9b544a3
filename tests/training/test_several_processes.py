"""On two processes as on one: optimizers and averages on shards, locked towers by DDP and FSDP2."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import distribute_tensor

from megabatch.data import Batch
from megabatch.losses.objective import create_objective
from megabatch.models.locking import locked_towers
from megabatch.training import TrainConfig
from megabatch.training.ema import Ema
from megabatch.training.encoders import CachedStep
from megabatch.training.optimizer import create_optimizer, load_state_tensors, state_tensors
from megabatch.training.parallel import lay_out
from megabatch.training.setup import build_towers
from megabatch.training.world import World as Ranks
from tests.models.tiny import TINY
from tests.similarity.distributed.processes import World, on_processes
from tests.training.test_optimizer import NAMES, give_gradients, small

CPU = torch.device("cpu")


@on_processes(2)
def test_shards_are_stepped_and_averaged_as_whole_parameters(world: World) -> None:
    # Norms over whole tensors (LAMB, LARS) and means over rows and columns (Adafactor) must not be
    # those of a rank's shard.
    for name in NAMES:
        whole = small()
        layout = lay_out(small(), "fsdp", Ranks(CPU, world.rank, world.size))
        sharded: Any = layout.module
        config = TrainConfig(opt=name, lr=0.1)  # type: ignore[arg-type]
        modules = (whole, sharded)
        optimizers = [create_optimizer(module, config) for module in modules]
        means = [Ema(module, 0.9) for module in modules]
        for seed in range(3):
            give_gradients(whole, seed)
            for p, q in zip(whole.parameters(), sharded.parameters(), strict=True):
                q.grad = distribute_tensor(p.grad.clone(), q.device_mesh, q.placements)
            for optimizer, mean in zip(optimizers, means, strict=True):
                optimizer.step()
                mean.update(seed + 1)
            if seed == 1:  # put back what a checkpoint holds
                kept = layout.scatter(layout.gather(state_tensors(sharded, optimizers[1])))
                optimizers[1] = create_optimizer(sharded, config)
                load_state_tensors(sharded, optimizers[1], kept)
        states = [
            {**m.state_dict(), **state_tensors(m, o), **e.state_tensors()}
            for m, o, e in zip(modules, optimizers, means, strict=True)
        ]
        assert states[0].keys() == states[1].keys()
        for key, value in states[0].items():
            other = _full(states[1][key])
            torch.testing.assert_close(other, value, msg=lambda m, at=(name, key): f"{at}: {m}")


@on_processes(2)
def test_locked_towers_and_all_losses_are_as_on_one_process(world: World) -> None:
    recipes: list[dict[str, Any]] = [
        {"lock_image": True},
        {"lock_text": True, "loss": "siglip", "duplicates": "positives"},
        {"loss": "infonce", "init_logit_bias": -1.0, "duplicates": "ignored"},
        {"loss": "infonce", "hard_negatives": 2, "duplicates": "ignored"},
    ]
    images = torch.randn(8, 3, 32, 32)
    with_negatives = torch.randint(1, 49_000, (8, 16, 3))
    ids = torch.tensor([3, 1, 4, 1, 5, 9, 2, 5])
    for recipe in recipes:
        config = TrainConfig(model=TINY, force_patch_dropout=0.0, **recipe)
        texts = with_negatives if config.hard_negatives else with_negatives[..., 0]
        alone = _model(config)
        objective = create_objective(config, group="local")
        labels = ids if "ids" in objective.takes else None
        step = CachedStep(alone, objective, 2, device=CPU, group="local")
        expected = step(Batch(images, texts, torch.arange(8)), labels)
        expected.backward()
        for wrap in ("ddp", "fsdp"):
            module = _model(config)
            calls = _count(module)
            locked = locked_towers(module)
            layout = lay_out(module, wrap, Ranks(CPU, world.rank, world.size))
            mine = slice(4 * world.rank, 4 * world.rank + 4)
            step = CachedStep(layout.model, create_objective(config), 2, device=CPU, locked=locked)
            share = Batch(images[mine], texts[mine], torch.arange(4))
            loss = step(share, None if labels is None else labels[mine])
            loss.backward()
            layout.end_step()
            whole = torch.tensor(float(loss))
            torch.distributed.all_reduce(whole)
            torch.testing.assert_close(whole / world.size, expected.detach())
            assert calls == {tower: 2 if tower in locked else 4 for tower in ("image", "text")}, (
                recipe
            )
            for (name, one), two in zip(alone.named_parameters(), module.parameters(), strict=True):
                assert (one.grad is None) == (two.grad is None), (recipe, wrap, name)
                if one.grad is not None:
                    gradient = _full(two.grad).reshape(one.grad.shape)  # FSDP2 has no scalars
                    torch.testing.assert_close(
                        gradient, one.grad, atol=1e-6, rtol=1e-4, msg=f"{recipe} {name}"
                    )


def _model(config: TrainConfig) -> nn.Module:
    torch.manual_seed(0)
    return build_towers(config).module


def _count(module: nn.Module) -> Counter[str]:
    calls: Counter[str] = Counter()
    whose: Any = module
    whose.visual.register_forward_pre_hook(lambda *_: calls.update(["image"]))
    whose.transformer.register_forward_pre_hook(lambda *_: calls.update(["text"]))
    return calls


def _full(tensor: Any) -> torch.Tensor:
    full: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full
