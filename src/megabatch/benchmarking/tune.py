"""Search for the fastest launch configuration of a fused kernel on this GPU.

A coordinate search from the packaged configuration: every candidate is compiled, checked against
float64 on random features, and timed. Candidates that do not compile, exceed the shared memory or
give wrong results are skipped.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor

from megabatch.benchmarking.clock import times
from megabatch.errors import UsageError
from megabatch.similarity import backends, dense, split_logsumexp
from megabatch.similarity.triton import configs
from megabatch.similarity.triton.configs import FEW_ROWS, VALUES, Config, Key
from megabatch.terminal import plain_console

#: Fields in the order of the search; only the backward kernel has split.
FIELDS = {
    "forward": ("rows", "group", "stages", "warps", "bk"),
    "backward": ("rows", "group", "split", "stages", "warps", "bk"),
}
#: Rows of the features for tuning, by whether rows are few.
ROWS = {True: 4096, False: 32_768}
CHECK_ROWS = 1024
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


def run(
    widths: Sequence[int], dtypes: Sequence[str], rows: Sequence[str], seconds: float, file: Path
) -> None:
    """Tune the kernels, print each candidate, and store the fastest; see `TuneOptions`."""
    console = plain_console()
    for target in _targets(widths, dtypes, rows):
        name = str(target.dtype).removeprefix("torch.")
        size = "few" if target.few else "many"
        title = f"{target.kernel}, {name}, width {target.width}, {size} rows"
        console.print(title, style="bold")
        found: list[Candidate] = []
        deadline = time.time() + seconds
        for one in search(target.packaged(), target.options(), target.measurer(), deadline):
            found.append(one)
            console.print(f"  {one}")
        chosen = best(found)
        gain = (found[0].ms or 0.0) / (chosen.ms or 1.0)
        console.print(f"  best: {chosen}: {gain:.3f} times as fast as before")
        try:  # each is stored as it is found, so an interrupted run loses only one
            configs.write(file, {target.key(): chosen.config})
        except OSError as error:
            raise UsageError(f"{file}: cannot be written: {error.strerror}") from error
    console.print(f"kept in {file}")


def _targets(widths: Sequence[int], dtypes: Sequence[str], rows: Sequence[str]) -> list[Target]:
    if not torch.cuda.is_available():
        raise UsageError("this machine has no CUDA device that torch can use: nothing to tune")
    if "float32" in dtypes:
        torch.set_float32_matmul_precision("high")
    if not backends.uses_kernels(torch.empty(1, 1, device="cuda", dtype=torch.bfloat16)):
        raise UsageError("there are no fused kernels for this machine: nothing to tune")
    return [
        Target(kernel, getattr(torch, dtype), width, size == "few")
        for width in widths
        for dtype in dtypes
        for size in rows
        for kernel in FIELDS
    ]


def search(
    first: Config, options: Mapping[str, Sequence[int]], measure: Measure, deadline: float
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
        for field, values in options.items():
            for value in values:
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
    except Exception as error:
        if isinstance(error, getattr(torch, "AcceleratorError", ())):
            raise  # the device is broken for this process
        first = str(error).strip().split("\n")[0]
        return Candidate(config, None, f"{type(error).__name__}: {first}"[:120])


def best(candidates: Sequence[Candidate]) -> Candidate:
    """The fastest candidate, or the first one if none is faster by more than noise."""
    usable = [t for t in candidates if t.ms is not None]
    return min(usable, key=lambda t: (t.ms or 0.0) * (1 - GAIN if t is candidates[0] else 1))


@dataclass(frozen=True)
class Target:
    """A kernel to tune, for one width, dtype and class of sizes."""

    kernel: str  #: "forward" or "backward"
    dtype: torch.dtype
    width: int
    few: bool  #: rows below `FEW_ROWS`

    def key(self) -> Key:
        """The key of the result in the tuning cache."""
        return Key.of(self.kernel, self._features(1 if self.few else FEW_ROWS)[0])

    def packaged(self) -> Config:
        """The packaged launch configuration."""
        return configs.packaged(self.kernel, self._features(1 if self.few else FEW_ROWS)[0])

    def options(self) -> dict[str, tuple[int, ...]]:
        """The values to try for each field."""
        found = {field: VALUES[field] for field in FIELDS[self.kernel]}
        wide = self.dtype.itemsize >= 4
        found["bk"] = (16, 32) if wide else (32, 64, 128)
        return found

    def measurer(self) -> Measure:
        """A function that checks a configuration and times its pass, forward or backward."""
        x, y = self._features(ROWS[self.few])
        small = self._features(CHECK_ROWS)
        exact = _exact(*small)

        def measure(config: Config) -> float:
            with configs.override({self.kernel: config}):
                _check(*small, exact, self.dtype)
                if self.kernel == "forward":
                    with torch.no_grad():
                        return median(times(lambda: _sums(x, y), "cuda", SECONDS, 3))
                total = _total(x, y)

                def backward() -> object:
                    return torch.autograd.grad(total, (x, y), retain_graph=True)

                return median(times(backward, "cuda", SECONDS, 3))

        return measure

    def _features(self, rows: int) -> tuple[Tensor, Tensor]:
        made = (F.normalize(torch.randn(rows, self.width, device="cuda"), dim=1) for _ in range(2))
        x, y = (t.to(self.dtype).requires_grad_() for t in made)
        return x, y


def _sums(x: Tensor, y: Tensor) -> list[Tensor]:
    sides = split_logsumexp(x, y, SCALE, group="local")
    return [part for side in sides if side is not None for part in (side.negative, side[2])]


def _total(x: Tensor, y: Tensor) -> Tensor:
    """A scalar with gradients for negatives and positives, as a loss has."""
    rows, positive, columns, _ = _sums(x, y)
    total: Tensor = (rows.sum() + columns.sum() - 2 * positive.sum()) / len(x)
    return total


def _exact(x: Tensor, y: Tensor) -> list[Tensor]:
    """Log-sum-exps of both sides and both gradients, in float64."""
    a, b = (t.detach().double().requires_grad_() for t in (x, y))
    rows, columns = dense.split_logsumexp(a, b, SCALE)
    total = (rows.negative + columns.negative - 2 * rows.positive_sum).sum() / len(a)
    gradients = torch.autograd.grad(total, (a, b))
    return [rows.negative.detach(), columns.negative.detach(), *gradients]


def _check(x: Tensor, y: Tensor, exact: Sequence[Tensor], dtype: torch.dtype) -> None:
    rows, _, columns, _ = _sums(x, y)
    gradients = torch.autograd.grad(_total(x, y), (x, y))
    tolerance = 8 * (2e-3 if dtype == torch.float32 else torch.finfo(dtype).eps)
    for got, want in zip((rows, columns), exact[:2], strict=True):
        if not torch.allclose(got.double(), want, rtol=0, atol=tolerance):
            raise ValueError("its log-sum-exps are wrong")
    for got, want in zip(gradients, exact[2:], strict=True):
        error = (got.double() - want).norm(dim=1) / want.norm(dim=1)
        if not bool((error < tolerance).all()):  # so that NaN fails
            raise ValueError(f"its gradients are wrong by {error.max().item():.2g}")
