"""OpenCLIP's trainer with megabatch's losses and gradient caching trains as it does by itself.

Its own runs and ours, of the unmodified `open_clip_train.main` with the same options, on shards of
glyphs: what it logs at each step, and the weights that it saves. They run with the release that is
installed, 3 or 4; a small trainer with the interface of 4 stands for it where 3 is.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import inspect
import json
import logging
import multiprocessing
import os
import random
import traceback
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias
from unittest import mock

import numpy as np
import open_clip
import pytest
import torch
from torch import Tensor

from megabatch.data.glyphs import load_glyphs, write_glyphs
from megabatch.errors import UsageError
from megabatch.training.world import leave
from tests import programs
from tests.integrations.open_clip_tasks import SAMPLES, Trainer
from tests.models.tiny import TINY
from tests.similarity.distributed.processes import forked, new_store, torchrun_environment

pytest.importorskip("open_clip_train")

STEPS, BATCH = 4, 8
Runs: TypeAlias = "dict[str, tuple[str, str]]"
Task: TypeAlias = "tuple[Runs, int, Sequence[int]]"

#: Whether OpenCLIP 4 is installed, which has tasks and FSDP2.
NEW = importlib.util.find_spec("open_clip.task") is not None
SCALE = "train/logit_scale" if NEW else "train/scale"

OPTIONS = (
    f"--model {TINY} --force-patch-dropout 0 --dataset-type webdataset --workers 0 --device cpu "
    f"--train-num-samples {STEPS * BATCH} --precision fp32 --epochs 1 --lr 0.1 --warmup 1 "
    "--opt timm/sgd --log-every-n-steps 1 --report-to tensorboard --train-data SHARDS"
)
# SGD's update, other than Adam's, changes with the length of the gradient.
ADAM = "--opt adamw --lr 1e-3 --beta1 0.9 --beta2 0.999 --eps 1e-6"
BOTH = "--local-loss --gather-with-grad"
DISTIL = f"--distill-model {TINY} --distill-pretrained FOLDER/teacher.pt"

#: Name -> "theirs" or "ours", and options. --batch-size is per process.
ALONE = {
    "clip": ("theirs", "--batch-size 8 --val-data SHARDS --val-num-samples 32"),
    "clip ours": ("ours", "--batch-size 8 --val-data SHARDS --val-num-samples 32"),
    "clip ours 4": ("ours", "--batch-size 2 --accum-freq 4 --grad-checkpointing"),
    "adam": ("theirs", f"--batch-size 4 --accum-freq 2 {ADAM}"),
    "adam ours 2": ("ours", f"--batch-size 4 --accum-freq 2 {ADAM}"),
    "siglip": ("theirs", "--batch-size 8 --siglip"),
    "siglip ours 2": ("ours", "--batch-size 4 --accum-freq 2 --siglip"),
    "distil": ("theirs", f"--batch-size 8 {DISTIL}"),
    "distil ours": ("ours", f"--batch-size 8 {DISTIL}"),
    "amp": ("theirs", "--batch-size 8 --precision amp --grad-clip-norm 0.5"),
    "amp ours 2": ("ours", "--batch-size 4 --accum-freq 2 --precision amp --grad-clip-norm 0.5"),
    "pure_bf16": ("theirs", "--batch-size 8 --precision pure_bf16"),
    "pure_bf16 ours 2": ("ours", "--batch-size 4 --accum-freq 2 --precision pure_bf16"),
}
PAIR = {
    "clip": ("theirs", f"--batch-size 4 {BOTH}"),
    "clip ours": ("ours", f"--batch-size 4 {BOTH}"),
    "clip ours 2": ("ours", f"--batch-size 2 --accum-freq 2 {BOTH}"),
    "default": ("theirs", "--batch-size 4"),
    "default ours 2": ("ours", "--batch-size 2 --accum-freq 2 --grad-clip-norm 1e3"),
    "distil": ("theirs", f"--batch-size 4 {DISTIL} {BOTH}"),
    "distil ours": ("ours", f"--batch-size 4 {DISTIL} {BOTH}"),
    "siglip": ("theirs", "--batch-size 4 --siglip --loss-dist-impl gather"),
    "siglip ours 2": ("ours", "--batch-size 2 --accum-freq 2 --siglip --loss-dist-impl gather"),
}
if NEW:
    PAIR["clip ours sharded"] = ("ours", f"--batch-size 2 --accum-freq 2 {BOTH} --fsdp")


class Recorder:
    """A stand-in for TensorBoard's writer, which takes seconds to import."""

    last: Recorder

    def __init__(self, folder: str) -> None:
        self.values: dict[str, list[float]] = {}
        Recorder.last = self

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.values.setdefault(name, []).append(value)


class OnCPU(torch.nn.parallel.DistributedDataParallel):
    """OpenCLIP's trainer passes `device_ids` on the CPU too, which DDP refuses."""

    def __init__(self, module: torch.nn.Module, device_ids: Any = None, **options: Any) -> None:
        super().__init__(module, **options)


def train_all(folder: Path, runs: Runs, rank: int, ports: Sequence[int]) -> None:
    """Train all runs in one process, alone or, with a port for each run, as one of two."""
    import open_clip_train.data
    import webdataset
    from open_clip_train import main as trainer

    from megabatch.integrations import open_clip as ours

    torch.set_num_threads(1)
    torch.nn.parallel.DistributedDataParallel = OnCPU  # type: ignore[misc]
    trainer.tensorboard = SimpleNamespace(SummaryWriter=Recorder)
    expander, shuffle = open_clip_train.data.tar_file_expander, webdataset.shuffle
    if "eof_value" in inspect.signature(expander).parameters:
        # OpenCLIP allows webdataset up to 0.2.86: it does not know the end-of-shard mark of later
        # releases.
        open_clip_train.data.tar_file_expander = functools.partial(expander, eof_value=None)
    for i, (name, (whose, options)) in enumerate(runs.items()):
        if ports:
            os.environ |= torchrun_environment(rank, 2, ports[i])
        logging.root.handlers.clear()  # of the previous run
        # The clock would seed it otherwise.
        webdataset.shuffle = functools.partial(shuffle, rng=random.Random(0))
        words = " ".join([OPTIONS, options, f"--logs {folder}/{1 + bool(ports)}"])
        words = words.replace("SHARDS", f"{folder}/shards/{{00000..00001}}.tar")
        main = trainer.main if whose == "theirs" else ours.main
        if whose == "ours":
            main = functools.partial(without_their_losses, main)
        main([*words.replace("FOLDER", str(folder)).split(), "--name", name])
        if rank == 0:
            values = json.dumps(Recorder.last.values)
            (folder / str(1 + bool(ports)) / name / "values.json").write_text(values)
        if ports:
            leave()


def without_their_losses(main: Callable[[list[str]], Any], words: list[str]) -> None:
    """Run; OpenCLIP's losses fail, which would give the same weights in more memory."""
    with contextlib.ExitStack() as stack:
        for name in ("ClipLoss", "SigLipLoss", "DistillClipLoss"):
            stack.enter_context(mock.patch.object(getattr(open_clip.loss, name), "forward", None))
        main(words)


def import_and_fork(folder: Path, tasks: Sequence[Task]) -> None:
    """Import open_clip, which takes seconds, and fork a process for each task."""
    import open_clip_train.main  # noqa: F401

    context: Any = multiprocessing.get_context("fork")
    processes = [context.Process(target=guarded, args=(folder, *task)) for task in tasks]
    for process in processes:
        process.start()
    for process in processes:
        process.join()


def guarded(folder: Path, runs: Runs, rank: int, ports: Sequence[int]) -> None:
    try:
        train_all(folder, runs, rank, ports)
    except BaseException:
        file = folder / f"failure of rank {rank} of {1 + bool(ports)}"
        file.write_text(traceback.format_exc())


@dataclass
class Run:
    """A run's logged values by name, one per step, and its weights."""

    values: dict[str, list[float]]
    weights: dict[str, Tensor]
    log: str

    @classmethod
    def read(cls, folder: Path) -> Run:
        saved = torch.load(folder / "checkpoints/epoch_1.pt", weights_only=True)["state_dict"]
        return cls(
            json.loads((folder / "values.json").read_text()),
            {name.removeprefix("module."): tensor for name, tensor in saved.items()},
            (folder / "out.log").read_text(),
        )


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all runs: in `1` those of one process, in `2` those of two."""
    folder = tmp_path_factory.mktemp("open_clip")
    train = load_glyphs().split("train")
    few = train.take(np.arange(0, 97 * STEPS * BATCH, 97))
    write_glyphs(few, folder / "shards", samples_per_shard=STEPS * BATCH // 2)
    torch.save(open_clip.create_model(TINY).state_dict(), folder / "teacher.pt")
    stores = [new_store() for _ in PAIR]
    ports = [store.port for store in stores]
    tasks = [(ALONE, 0, []), (PAIR, 0, ports), (PAIR, 1, ports)]
    process = forked(import_and_fork, folder, tasks)
    process.join(240)
    process.kill()
    failures = [f"{path.name}: {path.read_text()}" for path in folder.glob("failure*")]
    assert not failures, "\n".join(failures)
    return folder


#: Tolerances of logged values and of weights.
TOLERANCES = {
    # Adam moves weights whose gradient is rounding error alone, such as keys' biases.
    "adam": (1e-5, 1e-2),
    # In half precision OpenCLIP rounds the logits, and in bfloat16 the loss.
    "amp": (1e-3, 1e-3),
    "pure_bf16": (2e-2, 3e-2),
}


def compare(found: Run, expected: Run, values: float = 1e-5, weights: float = 1e-5) -> None:
    """Assert equal values at each step and equal weights, within these tolerances."""
    assert found.values.keys() <= expected.values.keys()
    for name, numbers in found.values.items():
        if not name.endswith(("time", "per_second", "per_gpu")):
            assert numbers == pytest.approx(expected.values[name], rel=values), name
    for name, weight in found.weights.items():
        wanted = expected.weights[name]
        torch.testing.assert_close(weight, wanted, rtol=weights, atol=weights, msg=name)


def moved(run: Run) -> bool:
    """Whether the run took all steps and changed its weights, of which the scale is one."""
    scales = run.values[SCALE]
    return scales[0] != scales[-1] and len(run.values["train/loss"]) == STEPS


@pytest.mark.concurrency
@pytest.mark.parametrize("name", [name for name in ALONE if "ours" in name])
def test_one_process(name: str, trained: Path) -> None:
    kind = name.split()[0]
    found, expected = Run.read(trained / "1" / name), Run.read(trained / "1" / kind)
    assert moved(found)
    compare(found, expected, *TOLERANCES.get(kind, ()))


@pytest.mark.concurrency
@pytest.mark.parametrize(
    "name", [name for name in PAIR if "ours" in name and "default" not in name]
)
def test_two_processes(name: str, trained: Path) -> None:
    found, expected = (Run.read(trained / "2" / n) for n in (name, name.split()[0]))
    assert moved(found)
    compare(found, expected)


@pytest.mark.concurrency
def test_two_processes_without_flags_get_the_right_gradient(trained: Path) -> None:
    """OpenCLIP itself divides the towers' gradients by the number of ranks."""
    found, own, right = (Run.read(trained / "2" / n) for n in ("default ours 2", "default", "clip"))
    for name, weight in found.weights.items():
        torch.testing.assert_close(weight, right.weights[name], rtol=1e-5, atol=1e-5, msg=name)
    losses = found.values["train/loss"]
    assert losses[0] == pytest.approx(own.values["train/loss"][0], rel=1e-5)
    if not NEW:  # OpenCLIP 3 logs rank 0's share of the loss with --local-loss
        assert abs(losses[0] - right.values["train/loss"][0]) > 1e-3
    assert abs(losses[-1] - own.values["train/loss"][-1]) > 1e-3


@pytest.mark.concurrency
def test_the_log_lists_differences(trained: Path) -> None:
    def lines(name: str) -> list[str]:
        log = Run.read(trained / name).log.splitlines()
        return [line.partition("megabatch ")[2] for line in log if "| megabatch " in line]

    assert lines("1/clip") == []
    (loss,) = lines("1/clip ours")
    assert "ClipLoss replaces OpenCLIP's" in loss
    assert "4: gradient caching, one loss of 8 pairs a step" in lines("1/clip ours 4")[1]
    assert "whatever --gather-with-grad says" in lines("2/clip ours")[1]
    assert "these are clipped more often" in lines("2/default ours 2")[-1]
    assert [line for line in lines("2/siglip ours 2") if "gather" in line] == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--model coca_ViT-B-32", "--model coca_ViT-B-32: CoCa also trains a captioning loss"),
        (f"{DISTIL} --accum-freq 2", "distils only without accumulation"),
        ("--ddp-static-graph --accum-freq 2", "--ddp-static-graph: with --accum-freq 2"),
        ("--accum-freq 0", "--accum-freq 0: expected at least 1"),
    ],
)
def test_refused(options: str, message: str) -> None:
    from megabatch.integrations import open_clip as ours

    with pytest.raises(UsageError, match=message):
        ours.main(["--model", TINY, *options.split()])


def test_an_unknown_loss_is_refused() -> None:
    from megabatch.integrations import open_clip as ours

    with pytest.raises(UsageError, match="Tanh: megabatch has no counterpart"):
        ours.create_loss(lambda args: torch.nn.Tanh(), Namespace())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"horovod": True}, "--horovod: the losses exchange features by torch.distributed"),
        ({"use_naflex": True}, "--use-naflex: with --accum-freq 2 the batches"),
        ({"torchcompile_strategy": "step"}, "--torchcompile-strategy step: with --accum-freq 2"),
    ],
)
def test_options_of_one_generation_are_refused(options: dict[str, Any], message: str) -> None:
    from megabatch.integrations import open_clip as ours

    args = Trainer().parse_args(["clip", "4", "2"])
    args.torchcompile = True
    ours.check(args)
    vars(args).update(options)
    with pytest.raises(UsageError, match=message):
        ours.check(args)


def train_small(monkeypatch: pytest.MonkeyPatch, trainer: Any, *words: str) -> None:
    """Run our `main` with a trainer in place of the installed one."""
    from megabatch.integrations import open_clip as ours

    monkeypatch.setattr(ours, "trainer", trainer)
    ours.main(words)


@pytest.mark.parametrize(("size", "accum"), [(8, 1), (4, 2), (2, 4)])
@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_a_task_trains_as_by_itself(
    kind: str, size: int, accum: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, found = Trainer(), Trainer()
    expected.main([kind, "8", "1"])
    train_small(monkeypatch, found, kind, str(size), str(accum))
    assert found.state.losses == pytest.approx(expected.state.losses, rel=1e-5)
    assert found.state.samples_seen == 2 * SAMPLES
    weights = expected.state.task.trainable_module.state_dict()
    torch.testing.assert_close(found.state.task.trainable_module.state_dict(), weights)
    assert type(found.state.task.loss).__module__.startswith("megabatch.")
    assert found.create_task is Trainer.create_task  # again


def test_an_unknown_task_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="GenLipTask: megabatch has no counterpart"):
        train_small(monkeypatch, Trainer(), "genlip", "8", "1")


def test_another_interface_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    other = SimpleNamespace(create_task=Trainer.create_task, train_one_epoch=lambda task, data: 0)
    for trainer in (SimpleNamespace(), other):
        with pytest.raises(UsageError, match=r"not built as this needs .* open_clip_torch 3\.1 to"):
            train_small(monkeypatch, trainer, "clip", "8", "1")


def test_the_program_refuses_in_one_line() -> None:
    ended = programs.run(["-m", "megabatch.integrations.open_clip", "--accum-freq", "0"])
    assert ended.returncode == 2
    assert ended.stderr.splitlines()[-1].startswith("megabatch.integrations.open_clip: --accum-fr")
