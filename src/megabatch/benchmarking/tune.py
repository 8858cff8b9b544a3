"""Find the fastest launch of a fused kernel on the GPU at hand.

A search along one field at a time, from the launch that would be taken without: every candidate is
compiled, checked against float64 on random features, and timed. One that does not compile, takes
more shared memory than there is or is wrong is left out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor

from megabatch.benchmarking.clock import times
from megabatch.similarity import dense, split_logsumexp
from megabatch.similarity.backends.triton import configs
from megabatch.similarity.backends.triton.configs import FEW_ROWS, VALUES, Config, Key

#: Fields that are searched, in this order; split concerns the backward kernel alone.
FIELDS = {
    "forward": ("rows", "group", "stages", "warps", "bk"),
    "backward": ("rows", "group", "split", "stages", "warps", "bk"),
}
#: Rows of the features that a class of sizes is tuned on.
ROWS = {True: 4096, False: 32_768}
CHECK_ROWS = 1024
SECONDS = 0.15
#: Faster by less is noise.
GAIN = 0.005
SCALE = 14.3

#: Milliseconds with a launch; raises where it does not run or is wrong.
Measure = Callable[[Config], float]


@dataclass(frozen=True)
class Tried:
    """One candidate."""

    config: Config
    ms: float | None  #: None: it cannot be used
    note: str = ""


def search(
    first: Config, options: Mapping[str, Sequence[int]], measure: Measure, deadline: float
) -> Iterator[Tried]:
    """Every candidate as it is measured, the first one first; each once.

    Field by field the best value so far is kept, until a round over all fields changes nothing or
    it is `deadline` (of time.time()).

    Raises:
        Exception: what `measure` raises for the first one.
    """
    best, best_ms = first, measure(first)
    yield Tried(first, best_ms)
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
                tried = _try(config, measure)
                yield tried
                if tried.ms is not None and tried.ms < best_ms * (1 - GAIN):
                    best, best_ms, changed = config, tried.ms, True


def _try(config: Config, measure: Measure) -> Tried:
    try:
        return Tried(config, measure(config))
    except Exception as error:
        if isinstance(error, getattr(torch, "AcceleratorError", ())):
            raise  # the device is broken for this process
        first = str(error).strip().split("\n")[0]
        return Tried(config, None, f"{type(error).__name__}: {first}"[:120])


def best(tried: Sequence[Tried]) -> Tried:
    """The fastest; the first one where none gains more than noise."""
    usable = [t for t in tried if t.ms is not None]
    return min(usable, key=lambda t: (t.ms or 0.0) * (1 - GAIN if t is tried[0] else 1))


@dataclass(frozen=True)
class Target:
    """What is tuned."""

    kernel: str  #: "forward" or "backward"
    dtype: torch.dtype
    width: int
    few: bool  #: rows below `FEW_ROWS`

    def key(self) -> Key:
        """Where the result belongs."""
        return Key.of(self.kernel, self._features(1 if self.few else FEW_ROWS)[0])

    def packaged(self) -> Config:
        """The launch without anything tuned."""
        x = self._features(1 if self.few else FEW_ROWS)[0]
        choose = {"forward": configs.packaged_forward, "backward": configs.packaged_backward}
        return choose[self.kernel](x)

    def options(self) -> dict[str, tuple[int, ...]]:
        """Values of the fields that are searched."""
        found = {field: VALUES[field] for field in FIELDS[self.kernel]}
        wide = self.dtype.itemsize >= 4
        found["bk"] = (16, 32) if wide else (32, 64, 128)
        return found

    def measurer(self) -> Measure:
        """Checks a launch and times the kernel in its place: forward, or backward alone."""
        x, y = self._features(ROWS[self.few])
        small = self._features(CHECK_ROWS)
        exact = _exact(*small)

        def measure(config: Config) -> float:
            with configs.trying({self.kernel: config}):
                _check(*small, exact, self.dtype)
                if self.kernel == "forward":
                    with torch.no_grad():
                        return median(times(lambda: _sums(x, y), "cuda", SECONDS, 3))
                total = _total(x, y)
                back = _backward(total, x, y)
                return median(times(back, "cuda", SECONDS, 3))

        return measure

    def _features(self, rows: int) -> tuple[Tensor, Tensor]:
        made = (F.normalize(torch.randn(rows, self.width, device="cuda"), dim=1) for _ in range(2))
        x, y = (t.to(self.dtype).requires_grad_() for t in made)
        return x, y


def _sums(x: Tensor, y: Tensor) -> list[Tensor]:
    sides = split_logsumexp(x, y, SCALE, group="local")
    return [part for side in sides if side is not None for part in (side.negative, side[2])]


def _total(x: Tensor, y: Tensor) -> Tensor:
    """A number whose gradient pulls at negatives and positives, as a loss's does."""
    near, positive, far, _ = _sums(x, y)
    total: Tensor = (near.sum() + far.sum() - 2 * positive.sum()) / len(x)
    return total


def _backward(total: Tensor, x: Tensor, y: Tensor) -> Callable[[], object]:
    return lambda: torch.autograd.grad(total, (x, y), retain_graph=True)


def _exact(x: Tensor, y: Tensor) -> list[Tensor]:
    """Log-sum-exps of both sides and both gradients, in float64."""
    a, b = (t.detach().double().requires_grad_() for t in (x, y))
    near, far = dense.split_logsumexp(a, b, SCALE)
    total = (near.negative + far.negative - 2 * near.positive_sum).sum() / len(a)
    gradients = torch.autograd.grad(total, (a, b))
    return [near.negative.detach(), far.negative.detach(), *gradients]


def _check(x: Tensor, y: Tensor, exact: Sequence[Tensor], dtype: torch.dtype) -> None:
    near, _, far, _ = _sums(x, y)
    gradients = torch.autograd.grad(_total(x, y), (x, y))
    tolerance = 8 * (2e-3 if dtype == torch.float32 else torch.finfo(dtype).eps)
    for got, want in zip((near, far), exact[:2], strict=True):
        if not torch.allclose(got.double(), want, rtol=0, atol=tolerance):
            raise ValueError("its log-sum-exps are wrong")
    for got, want in zip(gradients, exact[2:], strict=True):
        error = (got.double() - want).norm(dim=1) / want.norm(dim=1)
        if not bool((error < tolerance).all()):  # NaN is not below
            raise ValueError(f"its gradients are wrong by {error.max().item():.2g}")
