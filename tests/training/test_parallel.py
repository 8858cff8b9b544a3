"""Trainers, optimizers and locked towers on several Gloo processes against one process."""

from __future__ import annotations

import copy
import functools
import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from megabatch.config.objective import create_objective
from megabatch.data import Batch
from megabatch.errors import UsageError
from megabatch.models.blocks import compile_blocks
from megabatch.models.towers import locked_towers
from megabatch.training import TrainConfig
from megabatch.training.checkpoint import TrainingStopped
from megabatch.training.ema import Ema
from megabatch.training.encoders import CachedStep
from megabatch.training.optimizer import create_optimizer, load_state_tensors, state_tensors
from megabatch.training.parallel import full, lay_out
from megabatch.training.setup import build_towers
from megabatch.training.trainer import Trainer
from megabatch.training.world import World
from tests.models.tiny import TINY
from tests.similarity.distributed.processes import World as Processes
from tests.similarity.distributed.processes import on_processes
from tests.training.test_encoders import batch as images_and_captions
from tests.training.test_encoders import count_calls, gradients_of, tiny
from tests.training.test_optimizer import NAMES, give_gradients, small
from tests.training.toy import CPU, batch_of, config_of, share_of, toy, trainer_of

LAYOUTS = ("ddp", "fsdp")


def world_of(processes: Processes) -> World:
    return World(CPU, processes.rank, processes.size)


def sizes_of(size: int) -> list[int]:
    """Unequal shares of a batch of 8."""
    return {2: [5, 3], 3: [1, 5, 2]}[size]


def run(trainer: Trainer, steps: range, world: World | None = None) -> list[dict[str, float]]:
    batches = [batch_of(step) for step in steps]
    if world is not None:
        batches = [share_of(batch, sizes_of(world.size), world.rank) for batch in batches]
    return [trainer.train_step(batch) for batch in batches]


def assert_alike(got: dict[str, Any], expected: dict[str, Any], tolerance: float) -> None:
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, atol=tolerance, rtol=tolerance, msg=name)


def compare(processes: Processes, changes: dict[str, Any], tolerance: float = 1e-9) -> None:
    """Steps on all ranks, a checkpoint, and steps after it on other trainers, against one process.

    The checkpoint of one process goes to all ranks, that of all ranks to one process.
    """
    world, config = world_of(processes), config_of(ema_decay=0.9, **changes)
    alone, together = trainer_of(config), trainer_of(config, world)
    for ours, expected in zip(run(together, range(2), world), run(alone, range(2)), strict=True):
        assert_alike(ours, expected, tolerance)

    saved = copy.deepcopy(alone.checkpoint())
    made = together.checkpoint()
    if world.main:
        assert_alike(made.model, saved.model, tolerance)
        assert_alike(made.optimizer, saved.optimizer, tolerance)
    else:
        assert not made.model
        assert not made.optimizer

    run(alone, range(2, 4))
    continued = trainer_of(config, world)
    run(continued, range(7, 8), world)  # somewhere else; its state is replaced
    continued.restore(saved)
    run(continued, range(2, 4), world)
    for ema in (False, True):
        weights = continued.weights(ema=ema)
        if world.main:
            assert_alike(weights, alone.weights(ema=ema), tolerance)
    if world.main:
        back = trainer_of(config)
        back.layout.module.load_state_dict(made.model)
        assert back.step == 0


@on_processes(3)
def test_adamw(processes: Processes) -> None:
    for layout in LAYOUTS:
        compare(processes, {"parallel": layout, "grad_clip_norm": 0.1})


@on_processes(2)
def test_activations_computed_again_and_compiled_blocks(processes: Processes) -> None:
    """The same as without both on one process; compiling anew for each trainer takes seconds."""
    alone, world = trainer_of(config_of()), world_of(processes)
    expected = run(alone, range(2))
    with pytest.MonkeyPatch.context() as patch:
        eager = functools.partial(compile_blocks, backend="eager")
        patch.setattr("megabatch.training.trainer.compile_blocks", eager)
        for layout in LAYOUTS:
            config = config_of(parallel=layout, grad_checkpointing=True, torchcompile=True)
            together = trainer_of(config, world)
            for ours, theirs in zip(run(together, range(2), world), expected, strict=True):
                assert_alike(ours, theirs, 1e-9)
            made = together.checkpoint()
            if world.main:
                saved = alone.checkpoint()
                assert_alike(made.model, saved.model, 1e-9)
                assert_alike(made.optimizer, saved.optimizer, 1e-9)


@on_processes(2)
def test_fast_blocks(processes: Processes) -> None:
    """The same steps as open_clip's own blocks take on one process."""
    data, world = images_and_captions(8), world_of(processes)
    data.images = data.images.double()
    with pytest.MonkeyPatch.context() as patch:
        eager = functools.partial(compile_blocks, backend="eager")
        patch.setattr("megabatch.training.trainer.compile_blocks", eager)
        made = []
        for layout, among in (("ddp", None), *((layout, world) for layout in LAYOUTS)):
            changes = {"parallel": layout, "grad_checkpointing": True, "torchcompile": bool(among)}
            towers = tiny(force_patch_dropout=0.0)
            module, lengths = towers.module.double(), towers.lengths
            trainer = trainer_of(config_of(**changes), among, module=module, lengths=lengths)
            mine = data if among is None else share_of(data, sizes_of(2), world.rank)
            made.append([trainer.train_step(mine) for _ in range(2)])
        for found in made[1:]:
            for ours, expected in zip(found, made[0], strict=True):
                assert_alike(ours, expected, 1e-9)


@on_processes(2)
def test_ranks_that_start_apart_are_made_alike(processes: Processes) -> None:
    world = world_of(processes)
    for layout in LAYOUTS:
        module = toy()
        with torch.no_grad():
            for tensor in (*module.parameters(), *module.buffers()):
                tensor.add_(processes.rank)
        weights = Trainer(config_of(parallel=layout), module, CPU, 10, world).weights()
        if world.main:
            assert_alike(weights, toy().state_dict(), 0)


@on_processes(2)
def test_a_gradient_that_overflows_on_one_rank_is_left_out_on_all(processes: Processes) -> None:
    world = world_of(processes)
    for layout in LAYOUTS:
        trainer = trainer_of(config_of(parallel=layout, precision="fp16"), world)
        unscale = trainer.scaler.unscale_

        def overflowing(optimizer: Any, unscale: Any = unscale, t: Any = trainer) -> None:
            gradient = t.module.visual.first.weight.grad
            if isinstance(gradient, DTensor):  # of FSDP2 one rank's part, of DDP all ranks'
                gradient = gradient.to_local() if world.rank == 1 else torch.zeros(1, 1)
            gradient[0, 0] = math.inf
            unscale(optimizer)

        before = {name: value.clone() for name, value in trainer.weights().items()}
        trainer.scaler.unscale_ = overflowing  # type: ignore[method-assign]
        (values,) = run(trainer, range(1), world)
        assert "grad_norm" not in values
        assert math.isfinite(values["loss"])
        assert trainer.scaler.get_scale() == 2.0**15
        after = trainer.weights()
        if world.main:
            assert_alike(after, before, 0)
        trainer.scaler.unscale_ = unscale  # type: ignore[method-assign]
        assert "grad_norm" in run(trainer, range(1, 4), world)[-1]


@on_processes(2)
def test_a_number_that_is_none_stops_all_ranks(processes: Processes) -> None:
    world = world_of(processes)
    for layout in LAYOUTS:
        trainer = trainer_of(config_of(parallel=layout), world)
        run(trainer, range(1), world)
        before = {name: value.clone() for name, value in trainer.weights().items()}
        bad = share_of(batch_of(1), sizes_of(2), world.rank)
        if world.rank == 1:
            bad.texts[0, 0] = math.nan
        with pytest.raises(TrainingStopped, match="step 2: loss nan"):
            trainer.train_step(bad)
        after = trainer.weights()
        if world.main:
            assert_alike(after, before, 0)


@on_processes(2)
def test_a_parameter_that_ddp_would_wait_for_is_named(processes: Processes) -> None:
    module = toy()
    module.idle = nn.Linear(2, 2).double()  # type: ignore[assignment]
    trainer = Trainer(config_of(), module, CPU, 10, world_of(processes))
    with pytest.raises(UsageError, match=r"there is none of idle.weight, idle.bias$"):
        run(trainer, range(1), world_of(processes))


@on_processes(2)
def test_shards_are_stepped_and_averaged_as_whole_parameters(processes: Processes) -> None:
    # Norms over whole tensors (LAMB, LARS) and means over rows and columns (Adafactor) must not be
    # those of a rank's shard.
    for name in NAMES:
        whole = small()
        layout = lay_out(small(), "fsdp", world_of(processes))
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
            other = full(states[1][key])
            torch.testing.assert_close(other, value, msg=lambda m, at=(name, key): f"{at}: {m}")


@on_processes(2)
def test_locked_towers_and_all_losses_are_as_on_one_process(processes: Processes) -> None:
    recipes: list[dict[str, Any]] = [
        {"lock_image": True},
        {"lock_text": True, "loss": "siglip", "duplicates": "positives"},
        {"loss": "infonce", "init_logit_bias": -1.0, "duplicates": "ignored"},
        {"loss": "infonce", "hard_negatives": 2, "duplicates": "ignored"},
    ]
    ids = torch.tensor([3, 1, 4, 1, 5, 9, 2, 5])
    share = slice(4 * processes.rank, 4 * processes.rank + 4)
    for recipe in recipes:
        config = TrainConfig(model=TINY, force_patch_dropout=0.0, **recipe)
        data = images_and_captions(8, config.hard_negatives)
        torch.manual_seed(0)
        alone = build_towers(config).module
        start, locked = copy.deepcopy(alone), locked_towers(alone)
        objective = create_objective(config, group="local")
        labels = ids if "ids" in objective.takes else None
        step = CachedStep(alone, objective, 2, device=CPU, group="local")
        expected = step(data, labels)
        expected.backward()
        for wrap in LAYOUTS:
            module = copy.deepcopy(start)
            calls = count_calls(module)
            layout = lay_out(module, wrap, world_of(processes))
            step = CachedStep(layout.model, create_objective(config), 2, device=CPU, locked=locked)
            mine = Batch(data.images[share], data.texts[share], torch.arange(4))
            loss = step(mine, None if labels is None else labels[share])
            loss.backward()
            layout.end_step()
            whole = world_of(processes).mean(float(loss))
            assert whole == pytest.approx(float(expected))
            assert calls == {tower: 2 if tower in locked else 4 for tower in ("image", "text")}
            gradients = {  # FSDP2 has no scalars
                name: full(gradient).reshape(gradients_of(alone)[name].shape)
                for name, gradient in gradients_of(module).items()
            }
            assert_alike(gradients, gradients_of(alone), 1e-5)
