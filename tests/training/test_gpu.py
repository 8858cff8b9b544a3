"""The trainer on a GPU: glyph-small on pairs that are made here.

On the CPU: test_trainer (overflow, micro-batches, checkpoints), test_encoders (locked and compiled
towers), test_parallel (activations computed again), test_recipes (precisions), test_run_signals.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from megabatch import GradientCache, InfoNCELoss
from megabatch.data import Batch
from megabatch.training import TrainConfig, load_config
from megabatch.training.trainer import Trainer
from tests.process_state import changed
from tests.training.runs import losses, signal_after
from tests.training.synthetic import CONFIG, LOSSES, batch_of, losses_of, trainer_of, write_shard

pytestmark = pytest.mark.gpu

ICONS = "machinery.icon_towers:icon_small"


@pytest.fixture(autouse=True)
def _no_tf32() -> Iterator[None]:
    """Convolutions in whole float32 on GPUs too: by default they are rounded to TF32."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = before


@pytest.fixture(scope="module")
def reference() -> list[float]:
    """Losses in float32 on the CPU, nothing switched on."""
    return losses_of(trainer_of("cpu"))


@pytest.mark.parametrize(
    ("changes", "tolerance"),
    [
        ({}, 1e-4),
        ({"precision": "bf16"}, 3e-2),
        ({"precision": "fp16"}, 3e-2),
        ({"torchcompile": True}, 1e-4),
        ({"torchcompile": True, "precision": "bf16"}, 3e-2),
        ({"grad_checkpointing": True}, 1e-4),
        ({"grad_checkpointing": True, "torchcompile": True}, 1e-4),
        ({"micro_batch_size": 64}, 1e-4),
        ({"micro_batch_size": 24}, 1e-4),
        ({"micro_batch_size": 64, "on_host": True}, 1e-4),
        ({"micro_batch_size": 24, "on_host": True}, 1e-4),
    ],
)
def test_steps_are_those_of_float32_on_the_cpu(
    changes: dict[str, Any], tolerance: float, reference: list[float]
) -> None:
    torch._dynamo.reset()
    settings = {name: value for name, value in changes.items() if name != "on_host"}
    trainer = trainer_of("cuda", **settings)
    trainer._step.cache.gradients_on_host = changes.get("on_host")
    losses = losses_of(trainer)
    assert losses == pytest.approx(reference, rel=tolerance)
    assert losses[-1] < losses[0] - 0.1
    assert trainer.scaler.is_enabled() == (changes.get("precision") == "fp16")
    assert all(parameter.dtype == torch.float32 for parameter in trainer.module.parameters())


def test_float8_products_are_near_bfloat16_and_both_passes_alike() -> None:
    pytest.importorskip("torchao")
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("no float8 on this GPU")

    def batch(step: int) -> Batch:
        made = batch_of(step)
        made.images = made.images.repeat_interleave(2, 2).repeat_interleave(2, 3)
        return made

    found = {}
    for precision in ("bf16", "fp8"):
        torch._dynamo.reset()
        trainer = trainer_of("cuda", model=ICONS, precision=precision, torchcompile=True)
        trainer.module.visual.jitter = False
        found[precision] = [trainer.train_step(batch(step))["loss"] for step in range(LOSSES)]
        images = batch(0).images.cuda()
        with trainer._autocast():
            second = trainer.module(images)["image_features"]
            with torch.no_grad():
                assert torch.equal(trainer.module(images)["image_features"], second)
    assert found["fp8"] == pytest.approx(found["bf16"], rel=3e-2)
    assert found["fp8"] != found["bf16"]


def test_an_overflow_of_fp16_is_left_out_and_the_scale_lowered() -> None:
    trainer = trainer_of("cuda", precision="fp16")
    losses_of(trainer, range(1))
    trainer.scaler.load_state_dict(trainer.scaler.state_dict() | {"scale": 2.0**40})
    before = {name: value.clone() for name, value in trainer.weights().items()}
    record = trainer.train_step(batch_of(1))
    assert "loss" in record
    assert "grad_norm" not in record
    assert trainer.scaler.get_scale() == 2.0**39
    after = trainer.weights()
    assert all(torch.equal(after[name], value) for name, value in before.items())


@pytest.fixture
def _small_workspace() -> Iterator[None]:
    with changed("workspace", 16 << 20):
        yield


@pytest.mark.usefixtures("_small_workspace")
def test_checkpointed_activations_take_less_memory() -> None:
    # Beside the 6.3 and 1.7 GiB that are counted above: 84 MiB of gradients, and the loss.
    changes = {"model": ICONS, "micro_batch_size": 1024}
    kept, again = (
        _peak(trainer_of("cuda", grad_checkpointing=on, **changes), 1024, side=64)
        for on in (False, True)
    )
    assert again < 0.4 * kept


@pytest.mark.usefixtures("_small_workspace")
@pytest.mark.parametrize("on_host", [False, True])
def test_memory_grows_with_features_only(on_host: bool) -> None:
    # 2 x 256 bf16 numbers a pair are 1 kB; the largest phase has features, gradients and their
    # float32 accumulator, 4 kB. Activations of a pair are more than 200 kB.
    peaks = []
    for size in (8_192, 32_768):
        trainer = trainer_of("cuda", precision="bf16", micro_batch_size=256)
        trainer._step.cache.gradients_on_host = on_host
        peaks.append(_peak(trainer, size))
    assert (peaks[1] - peaks[0]) / (32_768 - 8_192) < 6 * 1024, peaks


@pytest.mark.usefixtures("_small_workspace")
def test_inputs_stay_on_the_host_but_for_two_micro_batches() -> None:
    tower = nn.Linear(1 << 16, 32).to("cuda")

    def encode(rows: Tensor) -> Tensor:
        return nn.functional.normalize(tower(rows), dim=-1)

    inputs = [torch.randn(2_048, 1 << 16) for _ in range(2)]  # 512 MiB each
    step = GradientCache((encode, encode), InfoNCELoss(0.1), 64, device="cuda")
    step(*inputs).backward()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    standing = torch.cuda.memory_allocated()
    step(*inputs).backward()
    # Two micro-batches are 32 MiB; a linear layer's graph keeps its input, and cuBLAS its own.
    assert torch.cuda.max_memory_allocated() - standing < 128 << 20


def test_the_size_of_micro_batches_is_found_and_kept(reference: list[float]) -> None:
    told: list[str] = []
    trainer = trainer_of("cuda", tell=told.append, micro_batch_size="auto")
    assert losses_of(trainer) == pytest.approx(reference, rel=1e-4)
    assert trainer.division.rows == CONFIG.global_batch_size  # which is encoded once
    assert told[0].startswith("micro-batches of 64 pairs (pairs/s through the towers: ")
    second = trainer_of("cuda", tell=told.append, micro_batch_size="auto")
    second.restore(trainer.checkpoint())
    assert not second.division.measures
    keeping = trainer_of("cuda", tell=told.append)
    assert losses_of(keeping) == pytest.approx(reference, rel=1e-4)
    assert keeping.division.kept == 4
    assert "the activations of 4 of 4 are kept" in told[1]


def whole_run(folder: Path, name: str, **changes: Any) -> TrainConfig:
    pytest.importorskip("webdataset", reason="whole runs read shards by webdataset")
    data = folder / "pairs.tar"
    if not data.exists():
        write_shard(data, 160)
    return replace(CONFIG, device="cuda", train_data=str(data), output=folder / name, **changes)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_run_stopped_by_sigterm_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    changes = {"precision": precision, "ema_decay": 0.9, "grad_clip_norm": 1.0, "steps": LOSSES}
    straight = whole_run(tmp_path, "straight", **changes)
    from megabatch.training import train

    assert train(straight) == 0
    stopped = whole_run(tmp_path, "stopped", checkpoint_every=0, **changes)
    with monkeypatch.context() as patch:
        signal_after(patch, 3, signal.SIGTERM)
        assert train(stopped) == 75
    assert train(replace(stopped, resume=True)) == 0
    # Sums of many addends are in no fixed order (the embedding's gradient).
    for file in ("model.safetensors", "model-ema.safetensors"):
        one, two = (load_file(run.output / file) for run in (straight, stopped))
        for name, value in one.items():
            torch.testing.assert_close(two[name], value, atol=1e-3, rtol=1e-3, msg=name)


def test_a_run_is_compiled_by_default(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    eager, compiled = whole_run(tmp_path, "eager"), whole_run(tmp_path, "all", torchcompile=None)
    from megabatch.training import train

    assert train(eager) == 0
    capsys.readouterr()
    assert train(compiled) == 0
    assert "the towers are compiled in the first steps" in capsys.readouterr().out
    assert load_config(compiled.output / "config.toml").torchcompile is True
    assert losses(compiled.output) == pytest.approx(losses(eager.output), rel=2e-3)


def _peak(trainer: Trainer, size: int, side: int = 32) -> int:
    """Bytes that the second step takes beside what stands from step to step."""
    first, second = batch_of(0, size), batch_of(1, size)
    for batch in (first, second):
        assert isinstance(batch.images, Tensor)
        batch.images = batch.images.repeat(1, 1, side // 32, side // 32)
    trainer.train_step(first)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    trainer.train_step(second)
    return torch.cuda.max_memory_allocated() - before
