"""OpenCLIP's trainer by itself and with megabatch in it: equal losses, seconds a step, memory.

    python benchmarks/openclip_trainer.py --output benchmarks/results/openclip-trainer.json

Both run the unmodified `open_clip_train.main` with the same options on the same shards, each run in
processes of its own (by torchrun if there are several): `openclip` alone, and `megabatch` by
`megabatch.integrations.open_clip`. Logged losses and logit scales are compared step by step with
OpenCLIP's run of the same options, and with its run of the undivided batch, if there is one. The
default is a small model on the CPU, one and two processes, with and without accumulation. On a GPU:

    python benchmarks/openclip_trainer.py --device cuda --processes 1 --model ViT-B-32 \\
        --batch-size 32768 --accum-freq 64 --steps 4 --precision amp_bf16 \\
        --options "--workers 24" --output benchmarks/results/openclip-trainer-gpu.json
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import inspect
import json
import random
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import open_clip
import torch

from megabatch.benchmarking import memory, records
from megabatch.data.glyphs import load_glyphs, write_glyphs

#: The default model: OpenCLIP chooses Adam's betas and epsilon by "vit" in its name.
MODEL = "vit-glyphs"
CONFIG = {
    "embed_dim": 64,
    "vision_cfg": {"image_size": 32, "patch_size": 8, "width": 64, "head_width": 32, "layers": 2},
    "text_cfg": {"context_length": 24, "vocab_size": 49408, "width": 64, "heads": 2, "layers": 2},
}
#: OpenCLIP's loader wants a shard for each worker.
SHARDS = 32
#: First argument of the processes of a run.
WORKER = "worker"
#: Tolerance of losses and logit scales in float32.
EQUAL = 1e-5


@dataclass(frozen=True)
class Record:
    """One run. Differences are the largest of all steps, relative to OpenCLIP's value."""

    contender: str
    loss: str
    device: str
    n_devices: int
    dtype: str
    b: int  #: pairs of a step, of all processes
    d: int
    model: str
    accum_freq: int
    steps: int
    status: str
    note: str
    seconds: float | None  #: a step's, median after the first; of the first process
    pairs_a_second: float | None
    waiting: float | None  #: of these seconds, for the loader; likewise
    extra_bytes: int | None  #: peak of the first process above what it had before the run
    first_loss: float | None
    last_loss: float | None
    loss_difference: float | None  #: from OpenCLIP's run of the same options
    scale_difference: float | None
    undivided_loss_difference: float | None  #: from OpenCLIP's run without accumulation
    undivided_scale_difference: float | None


def main() -> int:
    options = arguments()
    found: list[Record] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(options, folder)
        for processes in options.processes:
            own: dict[int, Any] = {}  # OpenCLIP's runs, by accumulation
            for accum in options.accum_freq:
                for contender in options.contenders:
                    ended = run(options, folder, contender, processes, accum)
                    if contender == "openclip":
                        own[accum] = ended
                    found.append(record(options, contender, processes, accum, ended, own))
                    print(found[-1], flush=True)
                    if options.output:
                        command = records.command_line(options.output)
                        records.write(options.output, command, found)
    return int(options.precision == "fp32" and not all(map(equal, found)))


def equal(found: Record) -> bool:
    """Whether a run of megabatch gave OpenCLIP's values, or there is nothing to compare it with."""
    differences = found.loss_difference, found.undivided_loss_difference
    return found.status == "ok" and all((value or 0.0) <= EQUAL for value in differences)


def prepare(options: argparse.Namespace, folder: Path) -> None:
    """Write the default model's configuration, and shards of as many glyphs as are needed."""
    (folder / f"{MODEL}.json").write_text(json.dumps(CONFIG))
    if options.data is None:
        train = load_glyphs().split("train")
        rows = np.arange(len(train))
        random.Random(0).shuffle(rows)
        wanted = options.batch_size * options.steps
        pairs = train.take(np.resize(rows, wanted))  # some again if there are not as many
        shards = write_glyphs(pairs, folder / "shards", samples_per_shard=-(-len(pairs) // SHARDS))
        options.data = f"{folder}/shards/{{{shards[0].stem}..{shards[-1].stem}}}.tar"


def run(
    options: argparse.Namespace, folder: Path, contender: str, processes: int, accum: int
) -> dict[str, Any]:
    """Run once; return the first process's lists of values by name, or the reason for a failure."""
    result = folder / "result.json"
    result.unlink(missing_ok=True)
    name = f"{contender}-{processes}-{accum}"
    words = [
        *("--model", options.model, "--dataset-type", "webdataset", "--train-data", options.data),
        *("--train-num-samples", options.batch_size * options.steps, "--epochs", 1),
        *("--batch-size", options.batch_size // processes // accum, "--accum-freq", accum),
        *("--precision", options.precision, "--device", options.device, "--workers", 0),
        # OpenCLIP's cosine divides by the steps after the warm-up.
        *("--lr", 1e-3, "--warmup", min(10, options.steps // 2), "--log-every-n-steps", 1),
        *("--report-to", "tensorboard", "--save-frequency", 0),
        *("--logs", folder / "logs", "--name", name),
        *(("--local-loss", "--gather-with-grad") if processes > 1 else ()),
        *shlex.split(options.options),
    ]
    launcher = [sys.executable]
    if processes > 1:
        launcher += [
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={processes}",
            "--",
        ]
    ended = subprocess.run(
        [*launcher, __file__, WORKER, contender, str(result), *map(str, words)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    if ended.returncode or not result.exists():
        lines = [line for line in ended.stderr.splitlines() if "rror" in line]
        return {"note": lines[-1] if lines else f"exit code {ended.returncode}"}
    found: dict[str, Any] = json.loads(result.read_text())
    return found


def work(contender: str, result: str, *words: str) -> None:
    """Run a contender with OpenCLIP's options in this process, and write what it logged."""
    import open_clip_train.data
    import webdataset
    from open_clip_train import main as trainer

    from megabatch.integrations import open_clip as integration

    config = Path(result).with_name(f"{MODEL}.json")
    if config.exists():
        open_clip.add_model_config(config)
    # Samples are shuffled by a generator that the clock seeds.
    webdataset.shuffle = functools.partial(webdataset.shuffle, rng=random.Random(0))
    expander = open_clip_train.data.tar_file_expander
    if "eof_value" in inspect.signature(expander).parameters:
        # OpenCLIP asks for webdataset 0.2.86 at most: it does not know the mark that later ones
        # put at the end of a shard.
        open_clip_train.data.tar_file_expander = functools.partial(expander, eof_value=None)
    trainer.tensorboard = SimpleNamespace(SummaryWriter=Recorder)
    trainer.train_one_epoch = watched(trainer.train_one_epoch)
    device = trainer.parse_args(list(words)).device
    if device == "cpu":
        torch.set_num_threads(1)
        torch.nn.parallel.DistributedDataParallel = OnCPU  # type: ignore[misc]
    main = trainer.main if contender == "openclip" else integration.main
    extra = memory.extra_bytes(lambda: main(list(words)), device)
    if "loss" in Recorder.values:  # on the first rank
        Path(result).write_text(json.dumps({**Recorder.values, "extra_bytes": extra}))


class Recorder:
    """Keeps what OpenCLIP's trainer gives TensorBoard's writer."""

    values: ClassVar[dict[str, list[float]]] = {}

    def __init__(self, folder: str) -> None:
        """`folder`: unused; this writes no file."""

    def add_scalar(self, name: str, value: float, step: int) -> None:
        name = name.removeprefix("train/").removeprefix("logit_")  # which OpenCLIP 4 adds
        Recorder.values.setdefault(name, []).append(value)


def watched(train_one_epoch: Callable[..., None]) -> Callable[..., None]:
    """OpenCLIP's function, whose loader keeps how long a batch of it is waited for."""

    @functools.wraps(train_one_epoch)
    def train(*args: Any, **options: Any) -> None:
        data = next(value for value in args if isinstance(value, dict))
        loader = Watched(data["train"].dataloader)
        data = data | {"train": dataclasses.replace(data["train"], dataloader=loader)}
        train_one_epoch(*(data if isinstance(v, dict) else v for v in args), **options)

    return train


class Watched:
    """A loader that records the seconds of waiting for each of its batches."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self._loader)
        while True:
            begun = time.perf_counter()
            batch = next(batches, None)
            if batch is None:
                return
            Recorder.values.setdefault("waiting", []).append(time.perf_counter() - begun)
            yield batch
            del batch


class OnCPU(torch.nn.parallel.DistributedDataParallel):
    """Without `device_ids`, which OpenCLIP passes on the CPU too, where DDP refuses them."""

    def __init__(self, module: torch.nn.Module, device_ids: Any = None, **options: Any) -> None:
        super().__init__(module, **options)


def record(
    options: argparse.Namespace,
    contender: str,
    processes: int,
    accum: int,
    found: dict[str, Any],
    own: dict[int, Any],
) -> Record:
    about = {
        "contender": contender,
        "loss": "siglip" if "--siglip" in options.options else "clip",
        "device": torch.cuda.get_device_name() if options.device != "cpu" else "cpu",
        "n_devices": processes,
        "dtype": options.precision,
        "b": options.batch_size,
        "d": options.width,
        "model": options.model,
        "accum_freq": accum,
        "steps": options.steps,
        "note": found.get("note", ""),
    }
    if about["note"]:
        status = "out of memory" if "OutOfMemory" in about["note"] else "failed"
        rest = [f for f in Record.__dataclass_fields__ if f not in about and f != "status"]
        return Record(**about, status=status, **dict.fromkeys(rest))
    # OpenCLIP takes the batches of a step one by one, megabatch all at once. Its loader has a few
    # more than whole steps need where the number of workers does not divide theirs.
    steps, batches = len(found["batch_time"]), accum if contender == "openclip" else 1
    waits = np.array(found["waiting"][: steps * batches]).reshape(steps, batches).sum(1)
    seconds, waiting = (np.median(each[1:] or each) for each in (found["batch_time"], [*waits]))

    def difference(key: str, accumulation: int) -> float | None:
        theirs = own.get(accumulation, {}).get(key)
        if contender == "openclip" or theirs is None:
            return None
        return max(abs(a - b) / abs(b) for a, b in zip(found[key], theirs, strict=True))

    return Record(
        **about,
        status="ok",
        seconds=round(float(seconds), 5),
        waiting=round(float(waiting), 5),
        pairs_a_second=round(float(options.batch_size / seconds), 1),
        extra_bytes=found["extra_bytes"],
        first_loss=found["loss"][0],
        last_loss=found["loss"][-1],
        loss_difference=difference("loss", accum),
        scale_difference=difference("scale", accum),
        undivided_loss_difference=difference("loss", 1),
        undivided_scale_difference=difference("scale", 1),
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--contenders", nargs="+", default=["openclip", "megabatch"])
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--accum-freq", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--batch-size", type=int, default=32, help="pairs of a step, altogether")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--data", help="shards, as OpenCLIP's --train-data; default: glyphs")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--options", default="", help="further ones of OpenCLIP's trainer")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    config = CONFIG if options.model == MODEL else open_clip.get_model_config(options.model)
    options.width = config["embed_dim"] if config else None
    for processes in options.processes:
        for accum in options.accum_freq:
            if options.batch_size % (processes * accum):
                parser.error(f"--batch-size: {options.batch_size} / {processes} / {accum}")
    return options


if __name__ == "__main__":
    if sys.argv[1:2] == [WORKER]:
        work(*sys.argv[2:])
    else:
        sys.exit(main())
