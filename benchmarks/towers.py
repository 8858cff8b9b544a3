"""The towers alone: how fast a step with gradient caching could be if nothing else took any time.

    python benchmarks/towers.py --output benchmarks/results/towers.json

A micro-batch of images and texts, both on the device already, goes through open_clip's towers with
bfloat16 autocast, without a loss or an optimizer: `twice`, forward without a graph, then forward
and backward, as caching needs it; `once`, forward and backward. Texts have 77 tokens, as the
tokenizer pads them, or `--lengths`. Eager, and compiled as the trainer compiles them.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import open_clip
import torch
from torch import Tensor, nn

from megabatch.benchmarking import clock, records
from megabatch.models import create
from megabatch.models.blocks import lists_to_compile


@dataclass(frozen=True)
class Record:
    """One way through the towers."""

    contender: str  #: "twice" or "once"
    model: str
    device: str
    n_devices: int
    dtype: str
    b: int  #: rows of the micro-batch
    tokens: int  #: of each text
    compiled: bool
    ms: float  #: the median
    pairs_a_second: float
    peak_bytes: int | None
    repetitions: int


def main() -> None:
    options = arguments()
    if options.model_config:
        open_clip.add_model_config(options.model_config)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    found: list[Record] = []
    for model, compiled in itertools.product(options.models, options.compiled):
        module = create(model).module.to(options.device)
        lists = lists_to_compile(module).values() if compiled else ()
        for part in itertools.chain.from_iterable(lists):
            part.compile(dynamic=False)
        for rows, tokens in itertools.product(options.micro_batch_sizes, options.lengths):
            torch._dynamo.reset()
            inputs = micro_batch(module, rows, tokens, options.device)
            for name in ("twice", "once"):
                call = passes(module, *inputs, twice=name == "twice")
                found.append(measured(call, name, model, compiled, rows, tokens, options))
                print(found[-1], flush=True)
                if options.output:
                    records.write(options.output, records.command_line(options.output), found)


def micro_batch(module: nn.Module, rows: int, tokens: int, device: str) -> tuple[Tensor, Tensor]:
    """Images, uint8 (rows, 3, s, s), and texts, int64 (rows, tokens), which end at the last one."""
    side = module.visual.image_size
    shape = tuple(side) if isinstance(side, (tuple, list)) else (side, side)
    images = torch.randint(256, (rows, 3, *shape), dtype=torch.uint8, device=device)
    texts = torch.randint(1, module.vocab_size - 2, (rows, tokens), device=device)
    texts[:, -1] = module.vocab_size - 1
    return images, texts


def passes(module: nn.Module, images: Tensor, texts: Tensor, *, twice: bool) -> Callable[[], None]:
    """A function that brings a micro-batch through the towers, gradients included."""
    device = images.device.type

    def call() -> None:
        module.zero_grad()
        with torch.autocast(device, torch.bfloat16):
            if twice:
                with torch.no_grad():
                    module(images, texts)
                torch.clear_autocast_cache()
            features = module(images, texts)
        outputs = [features[f"{tower}_features"] for tower in ("image", "text")]
        torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])

    return call


def measured(
    call: Callable[[], None],
    name: str,
    model: str,
    compiled: bool,
    rows: int,
    tokens: int,
    options: argparse.Namespace,
) -> Record:
    """Time a call after it has warmed up, for `--seconds`."""
    on_gpu = options.device == "cuda"
    for _ in range(2):
        call()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    times = sorted(clock.times(call, options.device, options.seconds, repetitions=3))
    ms = times[len(times) // 2]
    return Record(
        contender=name,
        model=model,
        device=torch.cuda.get_device_name() if on_gpu else options.device,
        n_devices=1,
        dtype="bfloat16",
        b=rows,
        tokens=tokens,
        compiled=compiled,
        ms=ms,
        pairs_a_second=1e3 * rows / ms,
        peak_bytes=torch.cuda.max_memory_allocated() if on_gpu else None,
        repetitions=len(times),
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    gpu = torch.cuda.is_available()
    parser.add_argument("--models", nargs="+", default=["ViT-B-32"])
    parser.add_argument("--model-config", type=Path, help="one that open_clip does not bring")
    parser.add_argument("--micro-batch-sizes", type=int, nargs="+", default=[512])
    parser.add_argument("--lengths", type=int, nargs="+", default=[77, 24], help="tokens of a text")
    parser.add_argument("--compiled", type=int, nargs="+", choices=(0, 1), default=[0, 1])
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if gpu else "cpu")
    parser.add_argument("--output", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
