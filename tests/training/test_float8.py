"""Training with float8 products, emulated on the CPU, through micro-batches, ranks, checkpoints."""

from __future__ import annotations

import contextlib
import functools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megabatch.config.objective import create_objective
from megabatch.data import Batch
from megabatch.errors import UsageError
from megabatch.models import create
from megabatch.models.float8 import use_float8
from megabatch.planning import make_plan
from megabatch.planning.machine import other_machine
from megabatch.training import TrainConfig, train
from megabatch.training.trainer import Trainer
from megabatch.training.world import World
from tests.models.tiny import TINY
from tests.similarity.distributed.processes import World as Processes
from tests.similarity.distributed.processes import on_processes
from tests.training.conftest import MakeConfig
from tests.training.test_encoders import batch as images_and_captions
from tests.training.test_encoders import tiny
from tests.training.toy import CPU, config_of

FP8 = {"precision": "fp8", "model": TINY}


def emulated(patch: pytest.MonkeyPatch) -> None:
    """Float8's products; all else in float32, as torchao knows autocast on GPUs only."""
    emulate = functools.partial(use_float8, emulate=True)
    patch.setattr("megabatch.training.trainer.use_float8", emulate)
    patch.setattr("megabatch.training.setup.check_float8", lambda *_: "emulated")
    patch.setattr(Trainer, "_autocast", lambda _: contextlib.nullcontext())


@pytest.fixture(autouse=True)
def _emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torchao.float8", exc_type=ImportError)  # not with torch 2.9
    emulated(monkeypatch)


def trainer_of(config: TrainConfig, world: World | None = None) -> Trainer:
    """A trainer of all ranks or, without a world, of this process alone."""
    towers = tiny()
    towers.module.visual.patch_dropout = torch.nn.Identity()
    objective = create_objective(config, group="local" if world is None else None)
    return Trainer(config, towers.module, CPU, 10, world, towers.lengths, objective)


def gradients_of(trainer: Trainer, data: Batch) -> dict[str, Tensor]:
    """The gradients of a step that is not taken."""
    trainer._gradients(data)
    found = {name: p.grad.clone() for name, p in trainer.module.named_parameters()}
    trainer.optimizer.zero_grad()
    return found


def test_both_passes_give_the_same_features() -> None:
    trainer, seen = trainer_of(config_of(**FP8)), []
    for tower in (trainer.module.visual, trainer.module.ln_final):
        tower.register_forward_hook(lambda _, __, output: seen.append(output))
    trainer.train_step(images_and_captions(6))
    first, second = seen[: len(seen) // 2], seen[len(seen) // 2 :]
    assert len(first) == len(second) == 6
    assert not any(output.requires_grad for output in first)
    assert all(output.requires_grad for output in second)
    assert all(any(torch.equal(one, other) for other in second) for one in first)


def test_the_size_of_micro_batches_and_padding_change_no_gradient() -> None:
    data = images_and_captions(8)
    whole = gradients_of(trainer_of(config_of(**FP8, micro_batch_size=8)), data)
    for changes in ({"micro_batch_size": 3}, {"micro_batch_size": 8, "trim_texts": False}):
        divided = gradients_of(trainer_of(config_of(**FP8, **changes)), data)
        for name, gradient in divided.items():
            # Sums of weights' gradients in bfloat16, a micro-batch at a time, round otherwise.
            assert (gradient - whole[name]).norm() < 0.01 * whole[name].norm(), name


@on_processes(2)
def test_on_several_processes(processes: Processes) -> None:
    world, data = World(CPU, processes.rank, processes.size), images_and_captions(8)
    own = slice(4 * processes.rank, 4 * processes.rank + 4)
    share = Batch(data.images[own], data.texts[own], data.indices[own])
    with pytest.MonkeyPatch.context() as patch:
        emulated(patch)
        for layout in ("ddp", "fsdp"):
            config = config_of(**FP8, parallel=layout, lr=1e-3)
            together = trainer_of(config, world)
            figures = together.train_step(share)
            made = together.checkpoint()
            alone = trainer_of(config)  # on each rank, for itself
            assert figures == pytest.approx(alone.train_step(data), rel=1e-3), layout
            if world.main:
                assert made.model.keys() == alone.checkpoint().model.keys()


def test_a_run_is_resumed_exported_and_evaluated_as_others(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    config = make_config(tmp_path / "one", precision="fp8", steps=4, lr_scheduler="const")
    assert train(config) == 0
    half = replace(config, output=tmp_path / "two", steps=2)
    assert train(half) == 0
    assert train(replace(half, steps=4, resume=True)) == 0
    (one, two) = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    plain = create(TINY).module.state_dict()
    assert one.keys() == plain.keys()
    for name, value in one.items():
        assert value.dtype == plain[name].dtype
        assert torch.equal(value, two[name])
    with pytest.raises(UsageError, match=r"--resume: .*--precision was fp8, is bf16"):
        train(replace(half, steps=6, resume=True, precision="bf16"))


def test_a_plan_counts_them_as_bfloat16() -> None:
    towers, machine = create(TINY), other_machine(1, 80 << 30, "H100")
    config = config_of(model=TINY, torchcompile=True, global_batch_size=64)
    fp8, bf16 = (make_plan(replace(config, precision=p), towers, machine) for p in ("fp8", "bf16"))
    assert fp8.parts == bf16.parts
    assert fp8.notes == ("products in float8 count as those in bfloat16", *bf16.notes)
