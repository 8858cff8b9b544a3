"""One step: what it changes and what it depends on."""

from __future__ import annotations

import copy
import math
from pathlib import Path

import pytest
import torch
from torch import nn

from megabatch import ClipLoss
from megabatch.data import Batch
from megabatch.models import create
from megabatch.training import TrainConfig
from megabatch.training.trainer import Trainer, TrainingStopped
from tests.models.tiny import TINY
from tests.training.conftest import MakeConfig
from tests.training.toy import WIDTH, config_of, toy
from tests.training.toy import batch_of as toy_batch
from tests.training.toy import trainer_of as toy_trainer


def trainer_of(config: TrainConfig) -> Trainer:
    torch.manual_seed(0)
    return Trainer(config, create(TINY).module, torch.device("cpu"), total_steps=10)


def batch(seed: int = 0, size: int = 6) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(size, 3, 32, 32, generator=generator)
    texts = torch.randint(1, 49_000, (size, 16), generator=generator)
    return Batch(images, texts, torch.arange(size))


@pytest.fixture
def config(make_config: MakeConfig, tmp_path: Path) -> TrainConfig:
    return make_config(tmp_path)


def test_the_step_is_the_whole_batchs_whatever_the_micro_batch(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    results = []
    for micro_batch_size in (2, 4, 100):
        # With a large epsilon AdamW's first step is in proportion to the gradient.
        changes = {"micro_batch_size": micro_batch_size, "eps": 1e3, "lr": 1e3, "warmup": 0}
        trainer = trainer_of(make_config(tmp_path, **changes))
        trainer.module.visual.patch_dropout = torch.nn.Identity()  # drawn per micro-batch
        trainer.train_step(batch())
        results.append(trainer.module.state_dict())
    for other in results[1:]:
        for name, value in results[0].items():
            torch.testing.assert_close(other[name], value, atol=1e-5, rtol=1e-4, msg=name)


def test_what_is_reported_is_the_loss_before_the_step(config: TrainConfig) -> None:
    trainer = trainer_of(config)
    trainer.module.visual.patch_dropout = torch.nn.Identity()
    data = batch()
    with torch.no_grad():
        expected = ClipLoss()(**trainer.module(data.images, data.texts))
    values = trainer.train_step(data)
    assert values["loss"] == pytest.approx(expected.item(), rel=1e-5)
    assert values["lr"] == config.lr / config.warmup
    assert values["grad_norm"] > 0
    assert trainer.step == 1
    assert all(parameter.grad is None for parameter in trainer.module.parameters())


def test_random_numbers_come_from_seed_and_step_alone(config: TrainConfig) -> None:
    losses = []
    for before in (1, 2):
        trainer = trainer_of(config)
        torch.manual_seed(before)
        losses.append(trainer.train_step(batch())["loss"])
    assert losses[0] == losses[1]
    trainer = trainer_of(config)
    trainer.step = 1
    assert trainer.train_step(batch())["loss"] != losses[0]  # patch dropout draws others


def test_the_logit_scale_is_clamped(make_config: MakeConfig, tmp_path: Path) -> None:
    trainer = trainer_of(make_config(tmp_path, max_logit_scale=20.0))
    with torch.no_grad():
        trainer.logit_scale.fill_(5.0)
    assert trainer.train_step(batch())["logit_scale"] == pytest.approx(20)
    with torch.no_grad():
        trainer.logit_scale.fill_(-3.0)
    assert trainer.train_step(batch())["logit_scale"] == pytest.approx(1)


def test_clipping_bounds_what_the_optimizer_sees(make_config: MakeConfig, tmp_path: Path) -> None:
    seen = []
    for limit in (None, 1e-3):
        trainer = trainer_of(make_config(tmp_path, grad_clip_norm=limit))
        values = trainer.train_step(batch())
        state = trainer.optimizer.state.values()
        means = torch.cat([s["exp_avg"].flatten() for s in state]) / (1 - trainer.config.beta1)
        seen.append((values["grad_norm"], means.norm().item()))
    assert seen[0][0] == seen[1][0] > 1e-3  # logged as it was before
    assert seen[0][1] == pytest.approx(seen[0][0], rel=1e-3)
    assert seen[1][1] == pytest.approx(1e-3, rel=1e-3)


def test_a_step_that_is_not_finite_changes_nothing(config: TrainConfig) -> None:
    trainer = trainer_of(config)
    before = {name: value.clone() for name, value in trainer.module.state_dict().items()}
    data = batch()
    data.images[0, 0, 0, 0] = math.nan
    trainer.module.visual.patch_dropout = torch.nn.Identity()
    with pytest.raises(TrainingStopped, match="step 1: loss nan"):
        trainer.train_step(data)
    assert all(torch.equal(v, before[n]) for n, v in trainer.module.state_dict().items())
    assert trainer.step == 0


def test_an_fp16_overflow_is_left_out_and_the_scale_lowered(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    trainer = trainer_of(make_config(tmp_path, precision="fp16"))
    trainer.scaler.load_state_dict({**trainer.scaler.state_dict(), "scale": 2.0**40})
    before = trainer.module.visual.proj.detach().clone()
    values = trainer.train_step(batch())
    assert "grad_norm" not in values
    assert math.isfinite(values["loss"])
    assert torch.equal(trainer.module.visual.proj, before)
    assert trainer.scaler.get_scale() == 2.0**39
    for _ in range(30):
        values = trainer.train_step(batch())
    assert "grad_norm" in values
    assert not torch.equal(trainer.module.visual.proj, before)


def test_a_restored_trainer_goes_on_as_the_first_one(config: TrainConfig) -> None:
    first, second = trainer_of(config), trainer_of(config)
    for seed in range(3):
        first.train_step(batch(seed))
    saved = copy.deepcopy(first.checkpoint(note="kept"))  # in a run it comes from the disk
    assert saved.state["note"] == "kept"
    second.restore(saved)
    for seed in (3, 4):
        assert first.train_step(batch(seed)) == second.train_step(batch(seed))
    assert all(
        torch.equal(value, second.module.state_dict()[name])
        for name, value in first.module.state_dict().items()
    )


def test_fp16_that_overflows_at_every_scale_is_given_up() -> None:
    trainer = toy_trainer(config_of(precision="fp16"))
    unscale = trainer.scaler.unscale_

    def overflowing(optimizer: torch.optim.Optimizer) -> None:
        trainer.module.visual.first.weight.grad[0, 0] = math.inf  # type: ignore[index, union-attr]
        unscale(optimizer)

    trainer.scaler.unscale_ = overflowing  # type: ignore[method-assign]
    for step in range(26):
        assert "grad_norm" not in trainer.train_step(toy_batch(step))
    with pytest.raises(TrainingStopped, match=r"step 27: the gradient overflows fp16"):
        trainer.train_step(toy_batch(26))


def test_a_step_left_out_leaves_running_statistics_as_they_were() -> None:
    module = toy()
    module.visual.first = nn.Sequential(module.visual.first, nn.BatchNorm1d(WIDTH).double())  # type: ignore[assignment]
    trainer = Trainer(config_of(on_nonfinite="skip"), module, torch.device("cpu"), 10)
    trainer.train_step(toy_batch(0))
    before = {name: value.clone() for name, value in module.state_dict().items()}
    assert before["visual.first.1.num_batches_tracked"] > 0
    bad = toy_batch(1)
    bad.images[0] = math.nan
    assert "loss" not in trainer.train_step(bad)
    assert all(torch.equal(v, before[n]) for n, v in module.state_dict().items())
    trainer.train_step(toy_batch(2))
    assert not torch.equal(
        module.state_dict()["visual.first.1.running_mean"], before["visual.first.1.running_mean"]
    )
