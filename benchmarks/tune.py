"""Search for the fastest launch configurations of the fused kernels on this machine's GPU.

    python benchmarks/tune.py --width 768

A coordinate search from the configuration in `megabatch.similarity.triton.configs`, where a better
one belongs: every candidate is compiled, checked against float64 on random features, and timed.
Candidates that do not compile, exceed the shared memory or give wrong results are skipped.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from megabatch.benchmarking.clock import times
from megabatch.benchmarking.measure import dense_clip_loss
from megabatch.losses import ClipLoss
from megabatch.similarity.triton import configs
from megabatch.similarity.triton.configs import Config

#: Values of each field, by kernel, in the order of the search. Those of
#: `megabatch.similarity.triton.hopper` have stages and warps of their own.
_BACKWARD = {
    "group": (1, 2, 4, 8, 16, 32, 64),
    "stages": (1, 2, 3, 4, 5),
    "warps": (4, 8),
    "bk": (32, 64, 128),
}
VALUES = {"forward": {"rows": (1, 2, 4, 8, 16)} | _BACKWARD, "backward": _BACKWARD}
SECONDS = 0.15
#: Relative gains below this are noise.
GAIN = 0.005
SCALE = 14.3

#: Returns milliseconds with a launch configuration; raises if it does not run or is wrong.
Measure = Callable[[Config], float]


@dataclass(frozen=True)
class Candidate:
    """One candidate."""

    config: Config
    ms: float | None  #: None: it cannot be used
    note: str = ""

    def __str__(self) -> str:
        fields = " ".join(f"{name} {value}" for name, value in vars(self.config).items())
        return f"{fields}: {self.note if self.ms is None else f'{self.ms:.3f} ms'}"


def search(
    first: Config, values: Mapping[str, Sequence[int]], measure: Measure, deadline: float
) -> Iterator[Candidate]:
    """Yield every candidate as it is measured, beginning with `first`; each once.

    The search keeps the best value of each field in turn, until a round over all fields changes
    nothing or time.time() reaches `deadline`.

    Raises:
        Exception: if `measure` raises it for `first`.
    """
    best, best_ms = first, measure(first)
    yield Candidate(first, best_ms)
    seen = {first}
    changed = True
    while changed:
        changed = False
        for field, choices in values.items():
            for value in choices:
                config = replace(best, **{field: value})
                if config in seen:
                    continue
                if time.time() > deadline:
                    return
                seen.add(config)
                candidate = _try(config, measure)
                yield candidate
                if candidate.ms is not None and candidate.ms < best_ms * (1 - GAIN):
                    best, best_ms, changed = config, candidate.ms, True


def _try(config: Config, measure: Measure) -> Candidate:
    try:
        return Candidate(config, measure(config))
    except torch.AcceleratorError:  # the device is broken for this process
        raise
    except Exception as error:
        first = str(error).strip().split("\n")[0]
        return Candidate(config, None, f"{type(error).__name__}: {first}"[:120])


def measurer(kernel: str, features: Callable[[int], tuple[Tensor, Tensor]], rows: int) -> Measure:
    """A function that checks a configuration and times its pass, forward or backward."""
    x, y = features(rows)
    small = features(1024)
    exact = exact_results(*small)

    def measure(config: Config) -> float:
        with patch.dict(configs.overrides, {kernel: config}):
            check(*small, exact)
            if kernel == "forward":
                with torch.no_grad():
                    return median(times(lambda: ClipLoss()(x, y, SCALE), "cuda", SECONDS, 3))
            loss = ClipLoss()(x, y, SCALE)

            def backward() -> object:
                return torch.autograd.grad(loss, (x, y), retain_graph=True)

            return median(times(backward, "cuda", SECONDS, 3))

    return measure


def exact_results(x: Tensor, y: Tensor) -> list[Tensor]:
    """The loss and both gradients in float64."""
    a, b = (t.detach().double().requires_grad_() for t in (x, y))
    loss = dense_clip_loss(a, b, SCALE)
    return [loss.detach(), *torch.autograd.grad(loss, (a, b))]


def check(x: Tensor, y: Tensor, exact: Sequence[Tensor]) -> None:
    """Raise a ValueError if the kernels' results differ from the exact ones."""
    loss = ClipLoss()(x, y, SCALE)
    tolerance = 8 * (2e-3 if x.dtype == torch.float32 else torch.finfo(x.dtype).eps)
    if not abs(loss.item() - exact[0].item()) < tolerance:  # so that NaN fails
        raise ValueError(f"its loss is {loss.item():.6g} instead of {exact[0].item():.6g}")
    for got, want in zip(torch.autograd.grad(loss, (x, y)), exact[1:], strict=True):
        error = (got.double() - want).norm(dim=1) / want.norm(dim=1)
        if not bool((error < tolerance).all()):
            raise ValueError(f"its gradients are wrong by {error.max().item():.2g}")


def main(argv: Sequence[str] | None = None) -> None:
    """Tune both kernels, print each candidate and the best."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--width", type=int, default=768, help="of the features")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--rows", type=int, default=32_768)
    parser.add_argument("--budget-seconds", type=float, default=150.0, help="of each kernel")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        sys.exit("this machine has no CUDA device that torch can use: nothing to tune")
    torch.set_float32_matmul_precision("high")  # the kernels take float32 as TF32
    dtype = getattr(torch, options.dtype)

    def features(rows: int) -> tuple[Tensor, Tensor]:
        made = (torch.randn(rows, options.width, device="cuda") for _ in range(2))
        x, y = (F.normalize(t, dim=1).to(dtype).requires_grad_() for t in made)
        return x, y

    for kernel, values in VALUES.items():
        print(f"{kernel}, {options.dtype}, {options.rows:,} rows, width {options.width}")
        first = configs.launch_config(kernel, features(options.rows)[0])
        measure, deadline = measurer(kernel, features, options.rows), time.time()
        found: list[Candidate] = []
        for one in search(first, values, measure, deadline + options.budget_seconds):
            found.append(one)
            print(f"  {one}", flush=True)
        ms, fastest = min((one.ms, str(one)) for one in found if one.ms is not None)
        print(f"  best: {fastest}, {(found[0].ms or 0.0) / ms:.3f} times as fast as before")


if __name__ == "__main__":
    main()
