"""OpenCLIP's trainer with megabatch's losses and gradient caching trains as it does by itself.

Its own runs and ours, of the unmodified `open_clip_train.main` with the same options, on shards of
glyphs: what it logs at each step, and the weights that it saves. They run with the release that is
installed, 3 or 4; a small trainer with the interface of 4 stands for it where 3 is.
"""

from __future__ import annotations

import functools
import inspect
import json
import logging
import os
import random
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias

import numpy as np
import open_clip
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from megabatch.data.glyphs import load_glyphs, write_glyphs
from megabatch.errors import UsageError
from megabatch.training.world import leave
from tests import programs
from tests.integrations.forks import run_in_forks
from tests.models.tiny import TINY
from tests.similarity.distributed.processes import new_store, torchrun_environment

pytest.importorskip("open_clip_train")

STEPS, BATCH = 4, 8
Runs: TypeAlias = "dict[str, tuple[str, str]]"

#: Whether OpenCLIP 4 is installed, which has tasks and FSDP2.
NEW = hasattr(open_clip, "create_task")
SCALE = "train/logit_scale" if NEW else "train/scale"
OPTIONS = (
    f"--model {TINY} --force-patch-dropout 0 --dataset-type webdataset --workers 0 --device cpu "
    f"--train-num-samples {STEPS * BATCH} --precision fp32 --epochs 1 --lr 0.1 --warmup 1 "
    "--opt timm/sgd --log-every-n-steps 1 --report-to tensorboard --train-data SHARDS"
)
BOTH = "--local-loss --gather-with-grad"
DISTIL = f"--distill-model {TINY} --distill-pretrained FOLDER/teacher.pt"
COMPILED = "--workers 1 --torchcompile --grad-checkpointing --val-data SHARDS --val-num-samples 32"

#: Name -> "theirs" or "ours", and options. --batch-size is per process.
ALONE = {
    "clip": ("theirs", "--batch-size 8 --val-data SHARDS --val-num-samples 32"),
    "clip ours": ("ours", "--batch-size 8 --val-data SHARDS --val-num-samples 32"),
    "clip ours 4": ("ours", "--batch-size 2 --accum-freq 4 --grad-checkpointing"),
    "compiled": ("theirs", f"--batch-size 8 {COMPILED}"),
    "compiled ours 2": (
        "ours",
        f"--batch-size 4 --accum-freq 2 --activation-memory 1GiB {COMPILED}",
    ),
    "distil": ("theirs", f"--batch-size 8 {DISTIL}"),
    "distil ours": ("ours", f"--batch-size 8 {DISTIL}"),
    "amp": ("theirs", "--batch-size 8 --precision amp --grad-clip-norm 0.5"),
    "amp ours 2": ("ours", "--batch-size 4 --accum-freq 2 --precision amp --grad-clip-norm 0.5"),
    "pure_bf16": ("theirs", "--batch-size 8 --precision pure_bf16 --workers 1"),
    "pure_bf16 ours 2": (
        "ours",
        "--batch-size 4 --accum-freq 2 --precision pure_bf16 --workers 1",
    ),
}
PAIR = {
    "clip": ("theirs", f"--batch-size 4 {BOTH}"),
    "clip ours": ("ours", f"--batch-size 4 {BOTH}"),
    "clip ours 2": ("ours", "--batch-size 2 --accum-freq 2 --grad-clip-norm 1e3"),
    "siglip": ("theirs", "--batch-size 4 --siglip --loss-dist-impl gather"),
    "siglip ours 2": ("ours", "--batch-size 2 --accum-freq 2 --siglip --loss-dist-impl gather"),
}
if NEW:
    PAIR["clip ours sharded"] = ("ours", f"--batch-size 2 --accum-freq 2 {BOTH} --fsdp")
RUNS = {"1": ALONE, "2": PAIR}


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
    torch.compile = functools.partial(torch.compile, backend="eager")
    ours.compile_blocks = functools.partial(ours.compile_blocks, backend="eager")
    expander, shuffle = open_clip_train.data.tar_file_expander, webdataset.shuffle
    if "eof_value" in inspect.signature(expander).parameters:
        # OpenCLIP allows webdataset up to 0.2.86: it does not know the end-of-shard mark of later
        # releases.
        open_clip_train.data.tar_file_expander = functools.partial(expander, eof_value=None)
    theirs_first = sorted(runs.items(), key=lambda run: run[1][0] == "ours")
    for i, (name, (whose, options)) in enumerate(theirs_first):
        if ports:
            os.environ |= torchrun_environment(rank, 2, ports[i])
        logging.root.handlers.clear()  # of the previous run
        # The clock would seed it otherwise.
        webdataset.shuffle = functools.partial(shuffle, rng=random.Random(0))
        words = " ".join([OPTIONS, options, f"--logs {folder}/{1 + bool(ports)}"])
        words = words.replace("SHARDS", f"{folder}/shards/{{00000..00001}}.tar")
        main = trainer.main if whose == "theirs" else ours.main
        if whose == "ours":  # with OpenCLIP's losses weights would be the same, in more memory
            for kind in ours.LOSSES:
                kind.forward = None  # type: ignore[assignment,method-assign]
        main([*words.replace("FOLDER", str(folder)).split(), "--name", name])
        if rank == 0:
            values = json.dumps(Recorder.last.values)
            (folder / str(1 + bool(ports)) / name / "values.json").write_text(values)
        if ports:
            leave()


@dataclass
class DataInfo:
    dataloader: Any


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
    tasks: list[Any] = [(ALONE, 0, []), (PAIR, 0, ports), (PAIR, 1, ports)]
    calls = [(train_all, (folder, *task)) for task in tasks]
    run_in_forks(["open_clip_train.main"], calls, folder, 240)
    return folder


def results(run: Path) -> tuple[dict[str, list[float]], dict[str, Tensor]]:
    """A run's logged values by name, one per step, and its weights."""
    saved = torch.load(run / "checkpoints/epoch_1.pt", weights_only=True)["state_dict"]
    weights = {name.removeprefix("module."): tensor for name, tensor in saved.items()}
    return json.loads((run / "values.json").read_text()), weights


#: Tolerances of logged values and of weights: OpenCLIP rounds the logits, in bfloat16 the loss too.
TOLERANCES = {"amp": (1e-3, 1e-3), "pure_bf16": (2e-2, 3e-2)}


@pytest.mark.concurrency
@pytest.mark.parametrize("name", [f"{i}/{n}" for i in RUNS for n in RUNS[i] if "ours" in n])
def test_trains_as_openclip_does(name: str, trained: Path) -> None:
    """On two processes also without --gather-with-grad, where its own gradients are too small."""
    kind = name.split()[0]
    (values, weights), (expected, wanted) = results(trained / name), results(trained / kind)
    assert values[SCALE][0] != values[SCALE][-1]
    assert len(values["train/loss"]) == STEPS
    assert values.keys() <= expected.keys()
    if name.endswith(" 2"):  # a loss of --batch-size pairs, of which there are fewer
        values.pop("val/clip_val_loss", None)
    relative, tolerance = TOLERANCES.get(kind.partition("/")[2], (1e-5, 1e-5))
    for key, numbers in values.items():
        if not key.endswith(("time", "per_second", "per_gpu")):
            assert numbers == pytest.approx(expected[key], rel=relative), key
    torch.testing.assert_close(weights, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.concurrency
def test_the_log_lists_differences(trained: Path) -> None:
    def lines(name: str) -> list[str]:
        log = (trained / name / "out.log").read_text().splitlines()
        return [line.partition("megabatch ")[2] for line in log if "| megabatch " in line]

    assert lines("1/clip") == []
    (loss,) = lines("1/clip ours")
    assert loss.endswith("its ClipLoss replaces OpenCLIP's, one loss of 8 pairs a step")
    assert "these are clipped more often" in lines("2/clip ours 2")[1]
    assert len(lines("2/clip ours")) == len(lines("2/siglip ours 2")) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ddp_static_graph": True}, "--ddp-static-graph: .* with --accum-freq 2; leave out one"),
        ({"horovod": True}, "--horovod: the losses exchange features by torch.distributed"),
        ({"use_naflex": True}, "--use-naflex: .* with --accum-freq 2; leave out one of them"),
        ({"torchcompile_strategy": "step"}, "--torchcompile-strategy step: .* --accum-freq 2"),
    ],
)
def test_refused_options(options: dict[str, Any], message: str) -> None:
    from megabatch.integrations import open_clip as ours

    args = Namespace(ddp_static_graph=False, torchcompile=True, accum_freq=2)
    ours.check(args)
    vars(args).update(options)
    with pytest.raises(UsageError, match=message):
        ours.check(args)


@pytest.mark.parametrize(
    ("size", "message"),
    [
        ("x", "expected a size such as 20GiB, got 'x'"),
        ("20GiB", "expected --accum-freq above 1, got 1"),
    ],
)
def test_memory_for_activations_is_refused(size: str, message: str) -> None:
    from megabatch.integrations import open_clip as ours

    with pytest.raises(UsageError, match=f"--activation-memory: {message}"):
        ours.main(["--activation-memory", size])


def test_another_interface_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from megabatch.integrations import open_clip as ours

    for trainer in (SimpleNamespace(), SimpleNamespace(train_one_epoch=lambda state, data: 0)):
        monkeypatch.setattr(ours, "trainer", trainer)
        with pytest.raises(UsageError, match=r"not built as this needs .* with 3\.1 to 3\.3"):
            ours.main([])


def test_the_program_refuses_in_one_line() -> None:
    words = ["--ddp-static-graph", "--accum-freq", "2"]
    ended = programs.run(["-m", "megabatch.integrations.open_clip", *words])
    assert ended.returncode == 2
    assert ended.stderr.splitlines()[-1].startswith("megabatch.integrations.open_clip: --ddp-s")


@pytest.mark.parametrize(("precision", "dtype"), [("fp32", torch.uint8), ("bf16", torch.float32)])
def test_the_model_takes_bytes_and_short_texts(precision: str, dtype: torch.dtype) -> None:
    """With the features and weights of OpenCLIP's own; in half precision OpenCLIP rounds pixels."""
    from megabatch.integrations.open_clip import Accumulation

    def created(create: Callable[..., Any]) -> tuple[Any, Tensor, Tensor, Any]:
        torch.manual_seed(0)
        model, train, evaluation = create(TINY, precision=precision, device="cpu", output_dict=True)
        image = Image.fromarray(np.arange(1200, dtype=np.uint8).reshape(20, 20, 3))
        return (
            model.eval(),
            *(make(image)[None] for make in (train, evaluation)),
            model.state_dict(),
        )

    accumulation = Accumulation(Namespace(precision=precision, torchcompile=True), None)
    create = open_clip.create_model_and_transforms
    model, image, evaluated, weights = created(functools.partial(accumulation.create_model, create))
    theirs, own_image, own_evaluated, own_weights = created(create)
    assert (image.dtype, evaluated.dtype) == (dtype, torch.float32)
    torch.testing.assert_close(weights, own_weights)
    text = open_clip.get_tokenizer(TINY)(["a cat"])
    assert accumulation.lengths is not None
    (length,) = accumulation.lengths(text).tolist()
    assert length < text.shape[1]
    input_dtype = open_clip.get_input_dtype(precision) or torch.float32
    given = image if dtype == torch.uint8 else image.to(input_dtype)
    found, expected = model(given, text[:, :length]), theirs(own_image.to(input_dtype), text)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(evaluated, own_evaluated)


# --- OpenCLIP 4, in small -------------------------------------------------------------------------


class CLIPTask(torch.nn.Module):
    """A task, which has a model and its loss; images have five numbers, texts three tokens."""

    data_keys = ("image", "text")

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        towers = {"image": torch.nn.Linear(5, 3), "text": torch.nn.EmbeddingBag(9, 3)}
        self.trainable_module = torch.nn.ModuleDict(towers)
        self.trainable_module.forward = self.features
        self.loss: Any = open_clip.loss.ClipLoss()

    def features(self, **batch: Tensor) -> dict[str, Tensor]:
        towers = self.trainable_module.items()
        found = {f"{k}_features": F.normalize(tower(batch[k])) for k, tower in towers}
        return {**found, "logit_scale": torch.tensor(5.0)}

    def prepare_batch(self, batch: Any, device: Any, input_dtype: Any) -> dict[str, Tensor]:
        return {name: batch[name] for name in self.data_keys}

    def forward(self, batch: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        found = self.trainable_module(**batch)
        return {"loss": self.loss(**found)}, {"logit_scale": found["logit_scale"]}


def train_one_epoch(state: Any, data: Any, args: Namespace, tb_writer: Any = None) -> None:
    """OpenCLIP 4's, without processes or accumulation."""
    optimizer = torch.optim.SGD(state.task.trainable_module.parameters(), 0.5)
    for batch in data["train"].dataloader:
        losses, report = state.task(state.task.prepare_batch(batch, torch.device("cpu"), None))
        optimizer.zero_grad()
        losses["loss"].backward()
        optimizer.step()
        state.losses.append(losses["loss"].item())
        assert report["logit_scale"] == 5


@pytest.mark.parametrize(("size", "accum"), [(8, 1), (2, 4)])
def test_a_task_trains_as_by_itself(size: int, accum: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from megabatch.integrations import open_clip as ours

    expected, found = (SimpleNamespace(task=CLIPTask(), losses=[]) for _ in range(2))
    args = Namespace(
        model="clip", batch_size=size, accum_freq=accum, rank=0, world_size=1, device="cpu",
        workers=0, precision="fp32", ddp_static_graph=False, torchcompile=False, siglip=False,
        gather_with_grad=True,
    )  # fmt: skip

    def main(_: Any) -> None:
        data = {"train": DataInfo(Numbers(size))}
        assert trainer.create_task(args, model=None) is found.task
        trainer.train_one_epoch(found, data, args)

    trainer: Any = SimpleNamespace(
        main=main, parse_args=lambda _: args, create_task=lambda args, model: found.task,
        train_one_epoch=train_one_epoch, create_model_and_transforms=None,
    )  # fmt: skip
    train_one_epoch(expected, {"train": DataInfo(Numbers(8))}, args)
    task = found.task
    monkeypatch.setattr(ours, "trainer", trainer)
    ours.main([])
    assert found.task is task
    assert found.losses == pytest.approx(expected.losses, rel=1e-5)
    torch.testing.assert_close(task.state_dict(), expected.task.state_dict())
    assert type(task.loss).__module__.startswith("megabatch.")


# --- the batches of a step ------------------------------------------------------------------------


class Numbers:
    """The same 26 samples in batches of any size, and the number of batches that were taken."""

    num_samples = 26

    def __init__(self, size: int) -> None:
        self.size, self.num_batches, self._loaded = size, 26 // size, 0

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for i in range(self.num_batches):
            self._loaded += 1
            yield {"image": self._rows(i), "text": self._rows(i)[:, :3].long() % 9}

    def loaded(self) -> int:
        return self._loaded

    def _rows(self, i: int) -> Tensor:
        return 10 * torch.arange(130.0).view(26, 5).sin()[i * self.size :][: self.size]


@pytest.mark.parametrize("workers", [0, 1])
def test_batches_of_a_step_are_joined(workers: int) -> None:
    """With worker processes those of the next step, meanwhile; the memory is that of two steps."""
    from megabatch.gradient_cache import SortedByLength
    from megabatch.integrations.open_clip import Accumulation, JoinedBatches

    own = Numbers(2)
    args = Namespace(accum_freq=2, batch_size=2, workers=workers, precision="bf16", device="cpu")
    accumulation = Accumulation(args, None)
    accumulation.lengths = lambda tokens: tokens[:, 0] % 3 + 1
    loader = JoinedBatches(own, accumulation, ("image", "text"))
    assert (loader.num_batches, loader.num_samples) == (6, 26)
    places, loaded = set(), own.loaded
    for step, batch in enumerate(loader):
        images, texts = batch.values()
        assert images.to(torch.device("cpu"), dtype=torch.bfloat16, non_blocking=True) is images
        assert len(images) == len(texts) == 4
        expected = torch.cat([own._rows(2 * step), own._rows(2 * step + 1)])
        assert torch.equal(images.batch, expected.bfloat16())
        places.add(images.batch.data_ptr())
        assert isinstance(texts.batch, SortedByLength)
        assert torch.equal(texts.batch.batch, expected[:, :3].long() % 9)
        deadline = time.monotonic() + 30
        while loaded() < 2 * min(6, step + 1 + workers) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert loaded() == 2 * min(6, step + 1 + workers)
        del images, texts
    assert step == 5
    assert loaded() == 13  # the last one is dropped
    assert len(places) == 1 + workers


def test_activations_are_kept_as_far_as_memory_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A micro-batch's take 5, of 95 usable bytes beside a peak of 50, and at most 30% more."""
    from megabatch.integrations.open_clip import Accumulation

    held = iter([10, 20, 25])
    for name, function in {
        "memory_allocated": lambda _: next(held),
        "mem_get_info": lambda _: (40, 1000),
        "memory_reserved": lambda _: 60,
        "max_memory_allocated": lambda _: 50,
        "reset_peak_memory_stats": lambda _: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, function)
    for bound, most, expected in ((None, 64, 5), (20, 64, 3), (None, 4, 4), (0, 64, 0)):
        held = iter([10, 20, 25])
        args = Namespace(device="cuda:0", accum_freq=most, rank=1)
        accumulation = Accumulation(args, bound)
        kept = []
        for _ in range(5):
            accumulation.between_passes(lambda: 1.3)
            kept.append(accumulation.kept)
        assert kept == ([0, 1, *[expected] * 3] if expected else [0] * 5)
