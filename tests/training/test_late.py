"""Late decoding in whole runs: the same run, whatever comes between its steps."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megabatch.cli import main
from megabatch.config.objective import create_objective
from megabatch.data import Batch
from megabatch.models import create
from megabatch.models.towers import lock
from megabatch.training import TrainConfig, save_config, train
from megabatch.training.encoders import CachedStep
from megabatch.training.trainer import Trainer
from tests.training.conftest import MakeConfig
from tests.training.runs import checkpoints, signal_after, weights
from tests.training.synthetic import batch_of


@pytest.fixture
def early(make_config: MakeConfig, tmp_path: Path) -> TrainConfig:
    """A run with open_clip's random crops and with patch dropout."""
    return make_config(tmp_path / "early", steps=5)


@pytest.fixture
def late(early: TrainConfig) -> TrainConfig:
    return replace(early, output=early.output.with_name("late"), workers=2, decode="late")


@pytest.mark.parametrize("changes", [{}, {"lock_image": True, "loss": "siglip"}])
def test_the_run_is_that_of_early_decoding_also_when_continued(
    early: TrainConfig,
    late: TrainConfig,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
) -> None:
    early, late = replace(early, **changes), replace(late, **changes)
    assert train(early) == 0
    with monkeypatch.context() as patch:
        signal_after(patch, 3, signal.SIGINT)
        assert train(late) == 130
    assert train(replace(late, resume=True)) == 0
    assert weights(late.output) == weights(early.output)


def test_a_damaged_image_leaves_its_pair_out_and_is_told(
    late: TrainConfig, pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for i in range(16):
        data = (pictures.parent / f"{i}.png").read_bytes()
        if i in (4, 11):
            data = data[:100] + b"???" + data[103:]
        (tmp_path / f"{i}.png").write_bytes(data)
    table = tmp_path / "damaged.csv"
    table.write_text("".join(pictures.read_text().splitlines(keepends=True)[:17]))
    config = replace(late, train_data=str(table), steps=4)  # two epochs
    assert train(config) == 0
    assert "skipped 2 x undecodable image (first: damaged.csv:row " in capsys.readouterr().out
    newest = config.output / "checkpoints" / checkpoints(config.output)[-1]
    assert (newest / "state.json").read_text().count('"undecodable image": 2') == 1


@pytest.mark.parametrize("locked", [False, True])
def test_the_loss_and_gradients_are_those_of_the_other_pairs(locked: bool) -> None:
    class Images:
        def __init__(self, rows: torch.Tensor) -> None:
            self.rows = rows
            self.bad: dict[int, tuple[str, str]] = {}

        def __len__(self) -> int:
            return len(self.rows)

        def __getitem__(self, rows: slice) -> torch.Tensor:
            self.bad |= {r: ("bad", "") for r in (1, 6) if rows.start <= r < rows.stop}
            return self.rows[rows]

    batch = batch_of(0, 8)
    good = torch.tensor([0, 2, 3, 4, 5, 7])
    ids = torch.tensor([1, 2, 3, 1, 2, 3, 4, 5])
    damaged = replace(batch, images=Images(batch.images))
    rest = Batch(batch.images[good], batch.texts[good], batch.indices[good])
    config = TrainConfig(duplicates="positives")
    found = []
    for one, labels in ((damaged, ids), (rest, ids[good])):
        torch.manual_seed(0)
        module = create("glyph-small").module
        if locked:
            lock(module, "image")
        step = CachedStep(module, create_objective(config), 3, device=torch.device("cpu"))
        loss = step(one, labels)
        loss.backward()
        found.append((loss, {n: p.grad for n, p in module.named_parameters()}))
    torch.testing.assert_close(found[0], found[1])


def test_decoding_that_fails_ends_the_run_with_a_line(
    late: TrainConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    step = Trainer.train_step

    def train_step(self: Trainer, batch: Batch) -> dict[str, float]:
        if self.step == 4:
            processes = batch.images._decoder._processes.loader._iterator._workers
            for process in processes:
                os.kill(process.pid, signal.SIGKILL)
                process.join()
        return step(self, batch)

    monkeypatch.setattr(Trainer, "train_step", train_step)
    path = late.output.with_suffix(".toml")
    save_config(replace(late, steps=30, global_batch_size=40), path)
    assert main(["train", "--config", str(path)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "decoding: DataLoader worker" in line
    assert checkpoints(late.output) == ["step-00000003"]
