"""Whole runs of several processes: the same as one process, however they are interrupted."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from megabatch.cli import main
from megabatch.data import Batch, PairLoader
from megabatch.evaluation import evaluate_run
from megabatch.training import TrainConfig, save_config, train
from megabatch.training.evaluating import figures
from megabatch.training.trainer import Trainer
from tests.models.tiny import TINY_UNMASKED
from tests.similarity.distributed.processes import new_store, start, torchrun_environment
from tests.training.conftest import MakeConfig
from tests.training.runs import checkpoints, logged, losses

SIZE = 2
#: Seconds that a process waits for one that hangs; longer than any step takes on a busy machine.
PATIENCE = 6


def worker(rank: int, size: int, port: int, jobs: list[tuple[str, Path, list[str], int]]) -> None:
    """Give the command once for each job, with a disturbance; write down what came of each."""
    torch.set_num_threads(1)
    for disturbance, folder, options, own_port in jobs:
        os.environ.update(torchrun_environment(rank, size, own_port))
        out, err = io.StringIO(), io.StringIO()
        redirected = contextlib.redirect_stdout(out), contextlib.redirect_stderr(err)
        with pytest.MonkeyPatch.context() as patch, redirected[0], redirected[1]:
            disturb(patch, disturbance if rank == 1 else "", folder)
            code = main(["train", *options])
        told = {"code": code, "out": out.getvalue(), "err": err.getvalue()}
        (folder / f"{rank}.json").write_text(json.dumps(told))
        if code == 1:  # the group may be broken: the program ends as it is
            os._exit(1)
        if dist.is_initialized():  # after an error nobody takes leave
            dist.destroy_process_group()


def disturb(patch: pytest.MonkeyPatch, how: str, folder: Path) -> None:
    """Let something happen to this rank in the step with the number 7."""
    step, data = Trainer.train_step, PairLoader.__iter__

    def train_step(self: Trainer, batch: Batch) -> dict[str, float]:
        if self.step == 6 and how.startswith("SIG"):
            os.kill(os.getpid(), getattr(signal, how))
        elif self.step == 6 and how == "hangs":
            while not (folder / "0.json").exists():  # until the other gives up
                time.sleep(0.1)
            os._exit(1)
        return step(self, batch)

    def iterate(self: PairLoader) -> Iterator[Batch]:
        for i, batch in enumerate(data(self)):
            if how == "no data" and self.epoch == 1 and i == 1:
                raise OSError(5, "Input/output error")
            yield batch

    patch.setattr(Trainer, "train_step", train_step)
    patch.setattr(PairLoader, "__iter__", iterate)


Launch = Callable[..., list[list[dict[str, Any]]]]


@pytest.fixture
def launch(tmp_path: Path) -> Launch:
    """Runs jobs one after the other on processes of one start; returns per job what each rank told.

    A rank that was killed or did not end told nothing.
    """

    def go(*jobs: tuple[str, TrainConfig], size: int = SIZE) -> list[list[dict[str, Any]]]:
        told = []
        stores = [new_store() for _ in jobs]  # one keeps what an earlier group said
        for number, (how, config) in enumerate(jobs):
            folder = tmp_path / f"job-{size}-{number}-{time.monotonic_ns()}"
            folder.mkdir()
            save_config(config, folder / "config.toml")
            options = ["--config", str(folder / "config.toml")] + ["--resume"] * config.resume
            told.append((how, folder, options, stores[number].port))
        processes = start(size, worker, told)
        deadline = time.monotonic() + 240
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
            alive = process.is_alive()
            process.kill()
            process.join()
            assert not alive, "a process was left over"
        found = [[folder / f"{rank}.json" for rank in range(size)] for _, folder, *_ in told]
        return [[json.loads(p.read_text()) if p.exists() else {} for p in ps] for ps in found]

    return go


@pytest.fixture
def config(make_config: MakeConfig, tmp_path: Path) -> TrainConfig:
    """A run of a small model that draws no random numbers.

    The bias of attention's keys has no gradient but rounding errors, which a larger `eps` than the
    usual one keeps Adam from magnifying.
    """
    options: dict[str, Any] = {"steps": 9, "lr": 1e-3, "eps": 1e-4, "checkpoint_every": 4}
    return make_config(tmp_path / "run", model=TINY_UNMASKED, **options)


def assert_close(run: Path, expected: Path) -> None:
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (run, expected))
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, atol=2e-5, rtol=1e-4, msg=name)


@pytest.mark.usefixtures("no_report")
def test_runs_of_two_processes_are_that_of_one(
    launch: Launch, config: TrainConfig, tmp_path: Path
) -> None:
    alone = replace(config, output=tmp_path / "alone")
    assert train(alone) == 0
    ddp = replace(config, output=tmp_path / "ddp")
    ddp = replace(ddp, val_data=config.train_data, val_frequency=4)
    fsdp = replace(ddp, output=tmp_path / "fsdp", parallel="fsdp", grad_checkpointing=True)
    stopped = replace(config, output=tmp_path / "stopped", parallel="fsdp")
    ctrl_c = replace(config, output=tmp_path / "ctrl-c")
    broken = replace(config, output=tmp_path / "broken", model="ViT-B32")
    told = launch(("", ddp), ("", fsdp), ("SIGTERM", stopped), ("SIGINT", ctrl_c), ("", broken))

    for run, (first, second) in zip((ddp, fsdp), told[:2], strict=True):
        assert (first["code"], second["code"]) == (0, 0), first["err"]
        assert_close(run.output, alone.output)
        assert losses(run.output) == pytest.approx(losses(alone.output), abs=1e-5)
        assert f"2 x cpu ({run.parallel})" in first["out"]
        assert "waiting for data" in first["out"]
        assert second["out"] == second["err"] == first["err"] == ""  # rank 0 speaks
        # Evaluated on both, each its share: the figures are one process's.
        assert first["out"].count("report:") == 1
        validated = logged(run.output, "validation.jsonl")
        assert [record["step"] for record in validated] == [4, 8, 9]
        recalls = {r["step"]: r["pairs/image_to_text/recall@1"] for r in validated}
        assert f"so far: step {max(recalls, key=recalls.__getitem__)}\n" in first["out"]
        for record in validated[-2:]:
            folder = run.output / f"checkpoints/step-{record['step']:08d}"
            again = figures(evaluate_run(folder, val_data=config.train_data))
            assert {"step": record["step"], "val_data": config.train_data, **again} == record

    for run, (first, second), code in ((stopped, told[2], 75), (ctrl_c, told[3], 130)):
        assert (first["code"], second["code"]) == (code, code)
        assert "interrupted after step 7 of 9" in first["out"]
        assert second["out"] == second["err"] == ""
        assert checkpoints(run.output)[-1] == "step-00000007"

    first, second = told[4]
    assert (first["code"], second["code"]) == (2, 2)
    assert first["err"].count("ViT-B32") == 1
    assert second["err"] == ""

    # What two processes left one continues, and three do under another layout.
    assert train(replace(ctrl_c, resume=True)) == 0
    assert_close(ctrl_c.output, alone.output)
    copy = replace(stopped, output=tmp_path / "copy")
    shutil.copytree(stopped.output, copy.output)
    (one,) = launch(("", replace(stopped, resume=True)), size=3)
    assert [rank["code"] for rank in one] == [0, 0, 0], one[0]["err"]
    assert_close(stopped.output, alone.output)
    assert train(replace(copy, resume=True, parallel="ddp")) == 0
    assert_close(copy.output, alone.output)


@pytest.mark.parametrize("how", ["SIGKILL", "hangs", "no data"])
def test_what_happens_to_one_process_ends_the_others_with_a_reason(
    launch: Launch, config: TrainConfig, how: str
) -> None:
    patience = PATIENCE if how == "hangs" else 120
    config = replace(config, dist_timeout=patience, steps=100)
    ((first, second),) = launch((how, config))
    assert first["code"] == 1
    assert len(first["err"].splitlines()) == 1
    saved = checkpoints(config.output)
    if how == "no data":
        assert "rank 1: reading data: " in first["err"]
        assert "Input/output error" in first["err"]
        assert (second["code"], second["err"]) == (1, "")
        assert saved[-1] == "step-00000006"
    else:
        assert "rank 0 of 2, step 7: another process is gone, or did not respond" in first["err"]
        assert saved == ["step-00000004"]
