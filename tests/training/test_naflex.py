"""Images of any shape as patches: exact gradients of micro-batches that are cut, and whole runs."""

from __future__ import annotations

import json
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data.naflex_transforms import Patchify

from megabatch.cli import main
from megabatch.config.objective import create_objective
from megabatch.data import Batch
from megabatch.errors import UsageError
from megabatch.models.towers import Tower, lock
from megabatch.training import TrainConfig, train
from megabatch.training.encoders import CachedStep
from megabatch.training.micro_batch import Trials
from tests.models.test_naflex import naflex
from tests.models.tiny_naflex import NAFLEX
from tests.training.conftest import MakeConfig
from tests.training.runs import losses, signal_after, weights
from tests.training.test_encoders import captions, dense_loss, gradients_of, sequence_shapes

#: Float32 whatever the model's dtype: timm's interpolation of positions, and its gradient.
POSITIONS = "visual.trunk.embeds.pos_embed"


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table of 24 pictures of different shapes with captions, the last one of them damaged."""
    folder = tmp_path_factory.mktemp("shapes")
    generator = np.random.default_rng(0)
    rows = ["filepath,title"]
    for i in range(24):
        high, wide = generator.integers(8, 60, 2)
        pixels = generator.integers(0, 256, (high, wide, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{i}.png")
        rows.append(f"{i}.png,picture number {i}")
    (folder / "23.png").write_bytes(b"no picture")
    (folder / "shapes.csv").write_text("\n".join(rows))
    return folder / "shapes.csv"


def batch_of_shapes(towers: Any, rows: int = 22) -> Batch:
    """Grids of 1 x 1 to 11 x 2 patches."""
    generator = torch.Generator().manual_seed(0)
    images = []
    for i in range(rows):
        shape = 3, 4 * (1 + i // 2), 4 * (1 + i % 2)
        pixels = torch.randint(256, shape, generator=generator, dtype=torch.uint8)
        images.append(Patchify(4)(pixels))
    return Batch(towers.eval_transform.collate(images), captions(rows), torch.arange(rows))


def retrieval(folder: Path) -> Any:
    return json.loads((folder / "evaluation.json").read_text())["retrieval"]


@pytest.mark.parametrize("locked", [(), ("image",), ("text",)])
def test_loss_and_gradients_of_micro_batches_are_those_of_one_pass(
    locked: tuple[Tower, ...],
) -> None:
    towers = naflex()
    for tower in locked:
        lock(towers.module, tower)
    module: Any = towers.module.double()
    data = batch_of_shapes(towers)
    expected = dense_loss(module, data)
    expected.backward()
    gradients = gradients_of(module)

    module.zero_grad()
    widths = sequence_shapes(module.visual.trunk.blocks[0])
    objective = create_objective(TrainConfig(duplicates="ignored"), group="local")
    options: Any = {"device": torch.device("cpu"), "group": "local", "lengths": towers.lengths}
    step = CachedStep(module, objective, 4, **options)
    loss = step(data, torch.arange(22) // 2)
    loss.backward()
    torch.testing.assert_close(loss.detach(), expected.detach(), rtol=0, atol=1e-12)
    found = gradients_of(module)
    assert found.keys() == gradients.keys()
    for name, gradient in gradients.items():
        tolerance = 1e-6 if name == POSITIONS else 1e-12
        torch.testing.assert_close(found[name], gradient, rtol=0, atol=tolerance, msg=name)
    first = widths[:6]
    assert sum(rows for rows, _ in first) == 22
    assert {columns for _, columns in first} == {24, 16, 8}
    assert max(rows * columns for rows, columns in first) < 4 * 24


def test_trials_measure_the_micro_batches_of_a_step() -> None:
    towers = naflex(48)
    step = CachedStep(
        towers.module,
        create_objective(TrainConfig(), group="local"),
        4,
        device=torch.device("cpu"),
        lengths=towers.lengths,
    )
    trials = Trials(step, batch_of_shapes(towers), torch.enable_grad)
    inputs, pairs = trials._inputs(4)
    assert pairs == 4
    assert inputs["image"]["patches"].shape[1:] == (16, 48)
    assert len(inputs["image"]["patch_valid"]) == len(inputs["image"]["patches"])
    assert trials.longer > 1


@pytest.mark.usefixtures("no_report")
def test_a_run_is_the_same_with_workers_when_continued_and_from_its_export(
    make_config: MakeConfig,
    shapes: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    straight = make_config(tmp_path / "straight", model=NAFLEX, train_data=str(shapes))
    straight = replace(straight, image_seq_len=24, steps=4, plan="warn", val_data=str(shapes))
    assert train(straight) == 0
    told = capsys.readouterr().out
    assert f"{NAFLEX} cannot be planned: its memory depends on the lengths of its images" in told
    assert "skipped 1 x undecodable image" in told
    folder = tmp_path / "openclip"
    assert main(["export", str(straight.output), "--to", "openclip", "--output", str(folder)]) == 0
    data = ["--val-data", str(shapes), "--device", "cpu"]
    assert main(["eval", "--model", f"local-dir:{folder}", *data, "--output", str(folder)]) == 0
    assert retrieval(folder) == retrieval(straight.output)
    other = replace(straight, output=tmp_path / "other", workers=1, val_data=None)
    with monkeypatch.context() as patch:
        signal_after(patch, 2, signal.SIGINT)
        assert train(other) == 130
    assert train(replace(other, resume=True)) == 0
    assert weights(other.output) == weights(straight.output)
    by_tokens = replace(straight, output=tmp_path / "by tokens", micro_batch_tokens=24)
    with pytest.raises(UsageError, match="expected auto, as all inputs have tokens"):
        train(replace(by_tokens, micro_batch_size=4))
    assert train(replace(by_tokens, micro_batch_size="auto", val_data=None)) == 0
    assert losses(by_tokens.output) == pytest.approx(losses(straight.output), abs=1e-4)


def test_settings_of_other_images_are_refused(
    make_config: MakeConfig, shapes: Path, tmp_path: Path
) -> None:
    config = make_config(tmp_path, model=NAFLEX, train_data=str(shapes), image_seq_len=24)
    with pytest.raises(UsageError, match=f"--decode late: {NAFLEX} takes inputs of diff"):
        train(replace(config, decode="late", workers=1))
    with pytest.raises(UsageError, match="--force-image-size 32: expected without --image-seq-len"):
        train(replace(config, force_image_size=32))
