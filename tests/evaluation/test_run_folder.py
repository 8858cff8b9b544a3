from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megabatch.errors import UsageError
from megabatch.evaluation.run_folder import open_run, read_metrics


def checkpoint(run: Path, step: int, state: dict[str, torch.Tensor]) -> Path:
    folder = run / "checkpoints" / f"step-{step:08d}"
    folder.mkdir(parents=True)
    save_file(state, folder / "model.safetensors")
    return folder / "model.safetensors"


def test_the_final_weights_are_loaded(run: Path) -> None:
    opened = open_run(run)
    assert (opened.weights, opened.step) == (run / "model.safetensors", None)
    (run / "checkpoints" / "step-00000012").mkdir(parents=True)
    assert open_run(run).step == 12
    assert opened.config["train_data"] == "glyphs"
    saved = load_file(run / "model.safetensors")
    for name, value in opened.towers.module.state_dict().items():
        assert torch.equal(value, saved[name])


def test_without_final_weights_the_newest_checkpoint_is_loaded(run: Path) -> None:
    state = load_file(run / "model.safetensors")
    (run / "model.safetensors").unlink()
    checkpoint(run, 9, state)
    good = checkpoint(run, 100, {**state, "logit_scale": torch.tensor(1.5)})
    (run / "checkpoints" / "step-00000300").mkdir()  # empty: nothing was written into it
    opened = open_run(run)
    assert (opened.weights, opened.step) == (good, 100)
    assert float(opened.towers.module.state_dict()["logit_scale"]) == 1.5


def only_cut_checkpoints(run: Path) -> None:
    state = load_file(run / "model.safetensors")
    (run / "model.safetensors").unlink()
    for step in (1, 2):
        os.truncate(checkpoint(run, step, state), 10)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda run: (run / "config.toml").unlink(), "is not a run: it has no config.toml"),
        (
            lambda run: (run / "model.safetensors").unlink(),
            "has no model.safetensors: and no checkpoint",
        ),
        (lambda run: (run / "config.toml").write_bytes(b"\xff\xfe\x00"), "cannot be read"),
        (lambda run: (run / "config.toml").write_text("lr = 1\n"), "must name a model, got None"),
        (lambda run: os.truncate(run / "model.safetensors", 5000), "model.safetensors is damaged"),
        (
            lambda run: save_file({"other": torch.ones(2)}, run / "model.safetensors"),
            "is damaged, or of another model: Error.* Missing key",
        ),
        (only_cut_checkpoints, "step-00000002.* is damaged"),
    ],
)
def test_a_damaged_run_is_refused_in_one_line(run: Path, damage: object, message: str) -> None:
    damage(run)  # type: ignore[operator]
    with pytest.raises(UsageError, match=message) as caught:
        open_run(run)
    assert "\n" not in str(caught.value)


def test_a_resumed_run_keeps_the_later_record_of_a_step(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert read_metrics(path) == []
    losses = [(1, 9.0), (2, 8.0), (3, 7.0), (2, 8.5), (3, 7.5)]
    lines = [json.dumps({"step": step, "loss": loss}) for step, loss in losses]
    path.write_text("\n".join([*lines, "[3]", "", '{"step": "x"}', '{"step": 2, "l']))
    assert [record["loss"] for record in read_metrics(path)] == [9.0, 8.5, 7.5]
