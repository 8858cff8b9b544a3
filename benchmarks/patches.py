"""The first layers of image transformers: pixels' normalisation, and the convolution of patches.

    python benchmarks/patches.py --output benchmarks/results/patches.json

`convolution` is torch's, `product` that of `megabatch.models.images`, both with bfloat16 autocast,
forward and backward for the weights, from float32 images on the device. `normalization` makes these
images of uint8 ones. `-compiled`: by torch.compile, as the trainer does it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from megabatch.benchmarking import clock, records
from megabatch.models.images import Normalization, PixelNormalization, multiply_patches

#: Width, side of a patch in pixels, and images at a time.
SHAPES = {"ViT-B-32": (768, 32, 2048), "ViT-B-16": (768, 16, 512), "ViT-L-14": (1024, 14, 512)}
CONTENDERS = (
    *("convolution", "product", "product-compiled"),
    *("normalization", "normalization-compiled"),
)


@dataclass(frozen=True)
class Record:
    """One layer of one model."""

    contender: str
    model: str
    device: str
    n_devices: int
    dtype: str
    b: int  #: images
    side: int  #: pixels of an image's side
    ms: float  #: the median
    us_an_image: float
    tflops: float | None  #: of the two products, in 10^12 operations per second
    repetitions: int


def main() -> None:
    options = arguments()
    on_gpu = options.device == "cuda"
    torch.backends.cudnn.benchmark = True
    found: list[Record] = []
    for model, (width, patch, images) in SHAPES.items():
        rows = options.images or images
        for name in CONTENDERS:
            torch._dynamo.reset()
            call = layer(name, width, patch, rows, options)
            for _ in range(3):
                call()
            times = sorted(clock.times(call, options.device, options.seconds, repetitions=5))
            ms = times[len(times) // 2]
            work = 2 * 2 * rows * (options.side // patch) ** 2 * width * 3 * patch**2
            record = Record(
                contender=name,
                model=model,
                device=torch.cuda.get_device_name() if on_gpu else options.device,
                n_devices=1,
                dtype="bfloat16",
                b=rows,
                side=options.side,
                ms=ms,
                us_an_image=1e3 * ms / rows,
                tflops=None if name.startswith("normalization") else work / ms / 1e9,
                repetitions=len(times),
            )
            found.append(record)
            print(record, flush=True)
            if options.output:
                records.write(options.output, records.command_line(options.output), found)


def layer(
    name: str, width: int, patch: int, rows: int, options: argparse.Namespace
) -> Callable[[], object]:
    """A function that computes a layer, with the gradient of its weights if it has any."""
    made: nn.Module
    if name.startswith("normalization"):
        made = PixelNormalization(Normalization((0.5,) * 3, (0.25,) * 3))
    else:
        made = nn.Sequential(nn.Conv2d(3, width, patch, patch, bias=False))
        if name.startswith("product"):
            multiply_patches(made)
    made = made.to(options.device)
    run = torch.compile(made, dynamic=False) if name.endswith("compiled") else made
    shape = (rows, 3, options.side, options.side)
    pixels = torch.randint(256, shape, dtype=torch.uint8, device=options.device)
    if name.startswith("normalization"):
        return lambda: run(pixels)
    images = pixels / 255
    gradient: Tensor | None = None

    def call() -> None:
        nonlocal gradient
        made.zero_grad()
        with torch.autocast(options.device, torch.bfloat16):
            features = run(images)
        gradient = torch.ones_like(features) if gradient is None else gradient
        features.backward(gradient)

    return call


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    gpu = torch.cuda.is_available()
    parser.add_argument("--images", type=int, help="default: the trainer's micro-batches on a GPU")
    parser.add_argument("--side", type=int, default=224, help="pixels of an image's side")
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if gpu else "cpu")
    parser.add_argument("--output", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
