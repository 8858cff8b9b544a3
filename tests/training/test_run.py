"""Whole short runs: what they leave behind, and how they are continued."""

from __future__ import annotations

import shlex
import signal
from dataclasses import replace
from pathlib import Path

import open_clip
import pytest
import torch
from safetensors.torch import load_file

from megabatch.cli import main
from megabatch.errors import UsageError
from megabatch.training import TrainConfig, load_config, train
from tests.models.tiny import TINY
from tests.training.conftest import MakeConfig
from tests.training.runs import checkpoints, logged, logged_lines, signal_after, weights


def test_a_run_leaves_what_it_promises(straight: TrainConfig) -> None:
    run = straight.output
    assert load_config(run / "config.toml") == replace(straight, torchcompile=False)
    assert checkpoints(run) == ["step-00000009", "step-00000012"]
    assert list((run / "tensorboard").glob("events.*"))
    records = logged(run)
    assert [record["step"] for record in records] == list(range(1, 13))
    assert [record["epoch"] for record in records] == [step / 5 for step in range(1, 13)]
    assert records[0]["samples"] == 8
    expected = {"step", "epoch", "samples", "loss", "lr", "logit_scale", "grad_norm"}
    measured = {"pairs_per_second", "data_wait", "seconds", "memory_bytes"}
    assert records[0].keys() == expected | measured
    assert all(0 <= record["data_wait"] <= 1 for record in records)
    assert sorted(path.name for path in run.iterdir()) == [
        *("checkpoints", "config.toml", "metrics.jsonl", "model.safetensors", "run.lock"),
        "tensorboard",
    ]


def test_workers_and_how_often_is_saved_and_logged_change_nothing_the_seed_does(
    straight: TrainConfig,
    make_config: MakeConfig,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    # `resume` where nothing is begins at the start.
    config = make_config(tmp_path / "run", workers=2, checkpoint_every=0, log_every=5, resume=True)
    assert train(config) == 0
    assert "no checkpoint yet: beginning at step 0" in capsys.readouterr().out
    assert weights(config.output) == weights(straight.output)
    assert [record["step"] for record in logged(config.output)] == [5, 10, 12]
    assert checkpoints(config.output) == ["step-00000012"]
    assert train(make_config(tmp_path / "other", seed=1, steps=1, warmup=0)) == 0
    assert logged(tmp_path / "other")[0]["loss"] != logged(straight.output)[0]["loss"]


def test_a_finished_run_stays_as_it_is_and_can_be_made_longer_but_not_shorter(
    make_config: MakeConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    output = tmp_path / "run"
    assert train(make_config(output, steps=4, lr_scheduler="const")) == 0
    longer = make_config(output, steps=7, lr_scheduler="const", resume=True)
    with monkeypatch.context() as patch:
        signal_after(patch, 5, signal.SIGINT)
        assert train(longer) == 130
    assert "length changes from 4 to 7 steps" in capsys.readouterr().out
    assert not (output / "model.safetensors").exists()  # no stale weights meanwhile
    assert train(longer) == 0
    assert train(make_config(tmp_path / "once", steps=7, lr_scheduler="const")) == 0
    assert weights(output) == weights(tmp_path / "once")
    lines = logged_lines(output)
    assert train(longer) == 0
    assert (weights(output), logged_lines(output)) == (weights(tmp_path / "once"), lines)
    assert load_config(output / "config.toml").steps == 7
    with pytest.raises(UsageError, match="has done 7 steps already, more than the 6"):
        train(make_config(output, steps=6, lr_scheduler="const", resume=True))


def test_open_clip_and_another_run_load_what_was_trained(
    straight: TrainConfig, make_config: MakeConfig, tmp_path: Path
) -> None:
    path = straight.output / "model.safetensors"
    config = make_config(tmp_path / "run", pretrained=path, steps=1, lr=1e-30, warmup=0)
    assert train(config) == 0
    trained, after = load_file(path), load_file(config.output / "model.safetensors")
    model = open_clip.create_model(TINY, pretrained=str(path))
    for name, value in model.state_dict().items():
        assert torch.equal(value, trained[name])
        assert torch.equal(after[name], trained[name])
    assert not torch.equal(open_clip.create_model(TINY).visual.proj, model.visual.proj)


def test_what_was_skipped_is_told_names_are_printed_as_they_are_and_commands_can_be_pasted(
    make_config: MakeConfig, pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "a [red] table.csv"
    rows = [f"{pictures.parent / f'{i}.png'},picture {i}" for i in range(17)]
    (tmp_path / "broken.png").write_bytes(b"no picture")
    rows += ["broken.png,a caption", "[/b] :cat:.png,missing"]
    table.write_text("\n".join(["filepath,title", *rows]) + "\n")
    run = tmp_path / "my [" / "run]"
    changes = {"train_data": str(table), "steps": 8, "report_to": ("tensorboard",)}
    assert train(make_config(run, **changes)) == 0
    out = capsys.readouterr().out
    assert f"pairs of {table}:" in out
    assert "skipped 1 x undecodable image" in out
    assert "[/b] :cat:.png" in out
    commands = [line.split(maxsplit=1)[1] for line in out.splitlines()[-2:]]
    assert [shlex.split(command)[-1] for command in commands] == [f"{run}/tensorboard", str(run)]
    assert main(shlex.split(commands[1])[1:]) == 0  # works as printed
    assert (run / "report.html").exists()


@pytest.mark.parametrize("val_data", ["nowhere", "x.csv"])
def test_an_evaluation_without_data_is_refused_before_anything_is_trained(
    make_config: MakeConfig, tmp_path: Path, val_data: str
) -> None:
    with pytest.raises(UsageError, match=rf"--val-data: .*{val_data}"):
        train(make_config(tmp_path / "run", val_data=val_data))
    assert not (tmp_path / "run").exists()


def test_two_epochs_of_glyph_small(
    make_config: MakeConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = {"steps": None, "epochs": 2, "log_every": 10, "micro_batch_size": 512}
    config = make_config(tmp_path / "run", model="glyph-small", ema_decay=0.5, **changes)
    assert train(config) == 0
    assert "10 steps of 8 pairs, 8 at a time" in capsys.readouterr().out
    (record,) = logged(config.output)
    assert (record["step"], record["epoch"]) == (10, 2.0)
    assert len(list((tmp_path / "run").rglob("*.safetensors"))) == 6
