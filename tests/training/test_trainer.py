"""One step: what it changes and what it depends on."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from open_clip.transformer import ResidualAttentionBlock
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.exc import TorchDynamoException
from torch.utils._python_dispatch import TorchDispatchMode

from megabatch import ClipLoss
from megabatch.data import Batch
from megabatch.models import create
from megabatch.models.blocks import blocks, compile_blocks
from megabatch.models.fast_blocks import FastBlock
from megabatch.training import TrainConfig
from megabatch.training.checkpoint import TrainingStopped
from megabatch.training.trainer import Trainer
from tests.models.tiny import TINY
from tests.training.conftest import MakeConfig
from tests.training.toy import batch_of as toy_batch
from tests.training.toy import config_of
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


def test_what_is_reported_is_the_loss_before_the_step(config: TrainConfig) -> None:
    trainer = trainer_of(config)
    trainer.module.visual.patch_dropout = torch.nn.Identity()
    data = batch()
    with torch.no_grad():
        expected = ClipLoss()(**trainer.module(data.images, data.texts))
    values = trainer.train_step(data)
    assert values["loss"] == pytest.approx(expected.item(), rel=1e-5)
    assert values["lr"] == config.lr / (config.warmup or 1)
    assert values["grad_norm"] > 0
    assert trainer.step == 1
    assert all(parameter.grad is None for parameter in trainer.module.parameters())


def test_random_numbers_come_from_seed_and_step_alone(config: TrainConfig) -> None:
    losses = []
    for step, before in ((0, 1), (0, 2), (1, 1)):
        trainer = trainer_of(config)
        trainer.step = step
        torch.manual_seed(before)
        losses.append(trainer.train_step(batch())["loss"])
    assert losses[0] == losses[1] != losses[2]  # patch dropout draws others


def test_the_logit_scale_is_clamped(make_config: MakeConfig, tmp_path: Path) -> None:
    trainer = trainer_of(make_config(tmp_path, max_logit_scale=20.0))
    for start, clamped in ((5.0, 20), (-3.0, 1)):
        trainer.logit_scale.detach().fill_(start)
        trainer.train_step(batch())
        assert trainer.scale_values() == {"logit_scale": pytest.approx(clamped)}


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


def test_a_checkpoint_of_another_model_is_told(config: TrainConfig) -> None:
    trainer = trainer_of(config)
    saved = trainer.checkpoint()
    saved.model["extra"] = torch.ones(1)
    with pytest.raises(TrainingStopped, match=r"^--resume: .* another model .*Unexpected key"):
        trainer.restore(saved)


class Waits(TorchDispatchMode):
    """Counts operations for which the host waits for a GPU, inside ATen and in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select"):
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


class DenseLoss(nn.Module):
    """Without tiles, whose torch operations on the CPU are chosen by values."""

    takes = frozenset()

    def forward(self, image_features: Any, text_features: Any, logit_scale: Any) -> Any:
        logits = logit_scale * image_features @ text_features.T
        return nn.functional.cross_entropy(logits, torch.arange(len(logits)))


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_step_waits_for_the_device_at_its_end(
    precision: str, make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = {"grad_clip_norm": 1.0, "ema_decay": 0.9}
    monkeypatch.setattr("megabatch.training.trainer.create_objective", lambda _: DenseLoss())
    trainer = trainer_of(make_config(tmp_path, precision=precision, micro_batch_size=2, **more))
    trainer.scaler = torch.amp.GradScaler("cpu", 1.0, enabled=precision == "fp16")
    trainer.train_step(batch())
    trainer.division.kept = 1
    waits = Waits()
    read = torch.Tensor.tolist

    def tolist(tensor: torch.Tensor) -> Any:  # no operation of its own on the CPU
        waits.seen.append("tolist")
        return read(tensor)

    monkeypatch.setattr(torch.Tensor, "tolist", tolist)
    with waits:
        trainer.train_step(batch(1))
    # GradientCache compares the scales of several micro-batches, between its two passes.
    assert waits.seen == ["_local_scalar_dense", "tolist"]
    with waits:
        trainer.scale_values()
    assert len(waits.seen) == 3


def test_compiled_blocks_take_the_same_steps(
    config: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    eager = functools.partial(compile_blocks, backend="eager")
    monkeypatch.setattr("megabatch.training.trainer.compile_blocks", eager)
    torch._dynamo.reset()
    kinds, values = [], []
    for compiled in (False, True):
        changes = {"torchcompile": compiled, "grad_checkpointing": compiled}
        trainer = trainer_of(dataclasses.replace(config, **changes))
        kinds.append({type(block) for block in blocks(trainer.module)})
        values.append([trainer.train_step(batch(step)) for step in range(3)])
    assert kinds == [{ResidualAttentionBlock}, {FastBlock}]
    for found, expected in zip(*values, strict=True):
        assert found == pytest.approx(expected, rel=1e-5)
    torch._dynamo.reset()


@pytest.mark.parametrize("passed", ["fw_compiler", "bw_compiler"])
def test_a_failing_compiler_names_the_option(monkeypatch: pytest.MonkeyPatch, passed: str) -> None:
    def failing(graph: Any, inputs: Any) -> Any:
        raise TorchDynamoException("no such kernel")  # as Inductor's errors are

    def backend(graph: Any, inputs: Any) -> Any:
        compilers = {"fw_compiler": lambda g, _: g, "bw_compiler": lambda g, _: g, passed: failing}
        lowered = aot_autograd(**compilers)
        return lowered(graph, inputs)

    compiled = functools.partial(compile_blocks, backend=backend)
    monkeypatch.setattr("megabatch.training.trainer.compile_blocks", compiled)
    torch._dynamo.reset()
    trainer = toy_trainer(config_of(torchcompile=True))
    with pytest.raises(TrainingStopped, match=r"compile fails \(--no-torchcompile trains"):
        trainer.train_step(toy_batch(0))
    torch._dynamo.reset()


def test_fp16_leaves_out_steps_that_overflow_until_no_scale_helps() -> None:
    trainer = toy_trainer(config_of(precision="fp16"))
    unscale, before = trainer.scaler.unscale_, copy.deepcopy(trainer.module.state_dict())

    def overflowing(optimizer: torch.optim.Optimizer) -> None:
        trainer.module.visual.first.weight.grad[0, 0] = math.inf  # type: ignore[index, union-attr]
        unscale(optimizer)

    trainer.scaler.unscale_ = overflowing  # type: ignore[method-assign]
    for step in range(26):
        values = trainer.train_step(toy_batch(step))
        assert "grad_norm" not in values
        assert math.isfinite(values["loss"])
    assert all(torch.equal(v, before[n]) for n, v in trainer.module.state_dict().items())
    assert trainer.scaler.get_scale() == 2.0 ** (16 - 26)
    with pytest.raises(TrainingStopped, match=r"step 27: the gradient overflows fp16"):
        trainer.train_step(toy_batch(26))
