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

import torch
import torch.nn.functional as F
from torch import Tensor

from megabatch.benchmarking.clock import times
from megabatch.similarity import dense, split_logsumexp
from megabatch.similarity.triton import configs
from megabatch.similarity.triton.configs import Config

#: Values of each field, by kernel, in the order of the search.
_FORWARD = {
    "rows": (1, 2, 4, 8, 16),
    "group": (1, 2, 4, 8, 16, 32, 64),
    "stages": (1, 2, 3, 4, 5),
    "warps": (4, 8),
    "bk": (32, 64, 128),
}
VALUES = {"forward": _FORWARD, "backward": _FORWARD | {"split": (1, 2)}}
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


def best(candidates: Sequence[Candidate]) -> Candidate:
    """The fastest candidate, or the first one if none is faster by more than noise."""
    usable = [t for t in candidates if t.ms is not None]
    return min(usable, key=lambda t: (t.ms or 0.0) * (1 - GAIN if t is candidates[0] else 1))


def measurer(kernel: str, features: Callable[[int], tuple[Tensor, Tensor]], rows: int) -> Measure:
    """A function that checks a configuration and times its pass, forward or backward."""
    x, y = features(rows)
    small = features(1024)
    exact = exact_results(*small)

    def measure(config: Config) -> float:
        with configs.override({kernel: config}):
            check(*small, exact)
            if kernel == "forward":
                with torch.no_grad():
                    return median(times(lambda: _sums(x, y), "cuda", SECONDS, 3))
            total = _total(x, y)

            def backward() -> object:
                return torch.autograd.grad(total, (x, y), retain_graph=True)

            return median(times(backward, "cuda", SECONDS, 3))

    return measure


def _sums(x: Tensor, y: Tensor) -> list[Tensor]:
    sides = split_logsumexp(x, y, SCALE, group="local")
    return [part for side in sides if side is not None for part in (side.negative, side[2])]


def _total(x: Tensor, y: Tensor) -> Tensor:
    """A scalar with gradients for negatives and positives, as a loss has."""
    rows, positive, columns, _ = _sums(x, y)
    total: Tensor = (rows.sum() + columns.sum() - 2 * positive.sum()) / len(x)
    return total


def exact_results(x: Tensor, y: Tensor) -> list[Tensor]:
    """Log-sum-exps of both sides and both gradients, in float64."""
    a, b = (t.detach().double().requires_grad_() for t in (x, y))
    rows, columns = dense.split_logsumexp(a, b, SCALE)
    total = (rows.negative + columns.negative - 2 * rows.positive_sum).sum() / len(a)
    gradients = torch.autograd.grad(total, (a, b))
    return [rows.negative.detach(), columns.negative.detach(), *gradients]


def check(x: Tensor, y: Tensor, exact: Sequence[Tensor]) -> None:
    """Raise a ValueError if the kernels' results differ from the exact ones."""
    rows, _, columns, _ = _sums(x, y)
    gradients = torch.autograd.grad(_total(x, y), (x, y))
    tolerance = 8 * (2e-3 if x.dtype == torch.float32 else torch.finfo(x.dtype).eps)
    for got, want in zip((rows, columns), exact[:2], strict=True):
        if not torch.allclose(got.double(), want, rtol=0, atol=tolerance):
            raise ValueError("its log-sum-exps are wrong")
    for got, want in zip(gradients, exact[2:], strict=True):
        error = (got.double() - want).norm(dim=1) / want.norm(dim=1)
        if not bool((error < tolerance).all()):  # so that NaN fails
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
        chosen = best(found)
        gain = (found[0].ms or 0.0) / (chosen.ms or 1.0)
        print(f"  best: {chosen}: {gain:.3f} times as fast as before")


if __name__ == "__main__":
    main()
