"""One case: the library's results and gradients against the dense expression's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fuzzing import cases
from fuzzing.calls import CALLS
from fuzzing.cases import LOSSES, RANKING, Case, Given
from fuzzing.dense import TRUTHS, plain, rounded
from megabatch import similarity

#: Relative to a tensor's largest number, in float64.
TOLERANCE = 1e-9
#: In a low precision: times the dense expression's own error.
FACTOR = 4.0
#: Thresholds nearer than this may be decided by a rounding.
UNDECIDED = 1e-6

#: Gradients by the name of an input and its rank, -1 where all ranks hold it alike.
Gradients = dict[tuple[str, int], Tensor]


class WrongError(AssertionError):
    """A result or a gradient differs from the dense expression's."""


class Side:
    """A case's tensors in some dtype: of one rank, or those of all ranks one after another."""

    def __init__(self, case: Case, ranks: list[int], dtype: torch.dtype, device: str) -> None:
        self.case, self.ranks, self.dtype, self.device = case, ranks, dtype, device
        self.leaves: Gradients = {}  #: what the features are views of
        #: of numbers besides the features
        self.wide = torch.float64 if dtype == torch.float64 else torch.float32

    def given(self, *, to_library: bool) -> Given:
        """The inputs of the library, or of the dense expression."""
        case = self.case
        features: dict[str, Tensor] = {}
        for name, made in case["features"].items():
            features[name] = features[made["is"]] if made["is"] else self._features(name)
        divides = case["call"] in ("infonce", "ntxent", "dcl", "supcon")  # a temperature
        scale = self._scalar("scale", 1 / case["scale"] if divides else case["scale"], to_library)
        bias = self._scalar("bias", case["bias"], to_library)
        masks = {
            name: self._rows(lambda rank, name=name: cases.mask(case, name, rank))
            for name in case["options"].get("present", ())
        }
        weights = self._rows(lambda rank: cases.weights(case, rank))
        if to_library and case["weights"] == "strided" and weights is not None:
            weights = torch.stack([weights, -weights], 1)[:, 0]
        if to_library and case["weights"] == "one" and weights is not None:
            weights = weights[:1].expand(len(weights))
        scale = 1 / scale if divides and not to_library else scale
        log_q = {name: self._log_q(name) for name in ("y", "negatives", "queue")}
        log_q = {name: value for name, value in log_q.items() if value is not None}
        return Given(features, scale, bias, self._ids(), weights, log_q, masks, [])

    def _log_q(self, name: str) -> Tensor | None:
        if not self.case["options"].get("log_q") or name not in self.case["features"]:
            return None
        ranks = self.ranks[:1] if name == "queue" else self.ranks
        leaves = {(f"log_q {name}", rank): cases.log_q(self.case, name, rank) for rank in ranks}
        for key, value in leaves.items():
            leaves[key] = value.to(self.device, self.wide).requires_grad_(name != "queue")
        self.leaves |= leaves
        return torch.cat(list(leaves.values()))

    def _features(self, name: str) -> Tensor:
        parts = []
        for rank in self.ranks[:1] if name.endswith("queue") else self.ranks:
            leaf = cases.leaf(self.case, name, rank)
            # Rounded as the library's are, whichever side this is.
            leaf = leaf.to(getattr(torch, self.case["dtype"])).to(self.device, self.dtype)
            leaf.requires_grad_(not self.case["features"][name]["frozen"])
            self.leaves[name, rank] = leaf
            parts.append(cases.view(self.case, name, rank, leaf))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _scalar(self, name: str, value: float, to_library: bool) -> Any:
        kind = self.case[f"{name}_as"]
        if self.case["dtype"] != "float64":
            value = torch.tensor(value, dtype=torch.float32).item()
        if kind == "number" and to_library:
            return value
        leaf = torch.tensor(value, dtype=self.wide, device=self.device)
        leaf = leaf.reshape((1,) if kind == "(1,)" else ())
        self.leaves[name, -1] = leaf.requires_grad_(self.case[f"{name}_learnt"])
        return leaf if to_library else leaf.reshape(())

    def _ids(self) -> dict[str, Tensor]:
        case, features = self.case, self.case["features"]
        without = ("distill", "ntxent", "dcl", "matryoshka", "multimodal")
        if case["ids"] is None or case["call"] in without:
            return {}
        names = ["x"] if case["call"] in ("clip", "siglip", "infonce") else ["x", "y"]
        return {
            name: self._rows(lambda r, name=name: cases.ids(case, name, r))
            for name in names
            if name in features
        }

    def _rows(self, make: Callable[[int], Tensor | None]) -> Any:
        parts = [part for rank in self.ranks if (part := make(rank)) is not None]
        if not parts:
            return None
        made = torch.cat(parts).to(self.device)
        return made.to(self.wide) if made.is_floating_point() else made

    def gradients(self, outputs: list[Tensor]) -> Gradients:
        """Gradients of one number made of all outputs with respect to the leaves; zeros if none."""
        wanted = {key: leaf for key, leaf in self.leaves.items() if leaf.requires_grad}
        if self.case["call"] in RANKING or not wanted:
            return {}
        total = self._objective(outputs)
        found: Any = [None] * len(wanted)
        if total.requires_grad:
            found = torch.autograd.grad(total, list(wanted.values()), allow_unused=True)
        return {
            key: torch.zeros_like(leaf) if gradient is None else gradient
            for (key, leaf), gradient in zip(wanted.items(), found, strict=True)
        }

    def _objective(self, outputs: list[Tensor]) -> Tensor:
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for k, values in enumerate(outputs):
            factors = torch.tensor(self.case["upstream"], dtype=torch.float64)
            if values.dim():
                sizes = rows_of(self.case, k, len(outputs))
                sources = [cases.generator(self.case, "up", k, rank) for rank in self.ranks]
                factors = torch.cat(
                    [
                        torch.randn(sizes[rank], generator=source, dtype=torch.float64)
                        for rank, source in zip(self.ranks, sources, strict=True)
                    ]
                )
            if values.is_floating_point():
                finite = values.double().masked_fill(~values.isfinite(), 0.0)
                total = total + (factors.to(self.device) * finite).sum()
        return total


def rows_of(case: Case, output: int, outputs: int) -> list[int]:
    """Rows on each rank of a result: of x, or in the second half of two sides' results of y."""
    columns = case["options"].get("sides") == "both" and output >= outputs // 2
    name = "y" if columns and "y" in case["features"] else "x"
    sizes: list[int] = case["features"][name]["rows"]
    return sizes


def check(case: Case, rank: int, device: str) -> str:
    """Run one case on this rank: "" or "undecided".

    Raises:
        WrongError: it differs from the dense expression.
    """
    call, dtype = case["call"], getattr(torch, case["dtype"])
    truth = Side(case, list(range(case["ranks"])), torch.float64, device)
    dense = truth.given(to_library=False)
    expected = TRUTHS[call](case, dense, plain)
    if dense.gaps and min(dense.gaps) < UNDECIDED:
        return "undecided"
    wanted = truth.gradients(expected)
    mine = Side(case, [rank], dtype, device)
    found = CALLS[call](case, mine.given(to_library=True), None if case["ranks"] > 1 else "local")
    similarity.set_workspace(
        case["workspace_after"]
    )  # which changes nothing that was called before
    gradients = mine.gradients(found)
    limits = Limits.exact(case, expected, wanted, dense)
    if dtype != torch.float64:
        peer = Side(case, [0], dtype, device)
        product = plain if (dtype, device) == (torch.float32, "cpu") else rounded
        outputs = TRUTHS[call](case, peer.given(to_library=False), product)
        limits.widen(case, dtype, outputs, peer.gradients(outputs))
    if call == "topk":
        _compare_topk(case, rank, found, expected)
    else:
        _compare_values(case, rank, found, expected, limits)
    _compare_gradients(case, gradients, wanted, limits)
    return ""


@dataclass
class Limits:
    """How far results and gradients may be from the dense expression's in float64."""

    expected: list[Tensor]
    wanted: Gradients
    values: list[float]
    gradients: dict[tuple[str, int], float]
    length: float  #: of the longest row

    @classmethod
    def exact(cls, case: Case, expected: list[Tensor], wanted: Gradients, dense: Given) -> Limits:
        """In float64; a gradient may be a small difference of numbers of a natural size."""
        length = max(_size(f.detach().norm(dim=-1)) for f in dense.features.values())
        natural = abs(case["upstream"]) * (1 + case["scale"]) * (1 + length) ** 2
        values = [TOLERANCE * max(1.0, _size(values)) for values in expected]
        floor = 1e-13 * natural * case["ranks"]
        gradients = {key: TOLERANCE * _size(exact) + floor for key, exact in wanted.items()}
        return cls(expected, wanted, values, gradients, length)

    def widen(
        self, case: Case, dtype: torch.dtype, outputs: list[Tensor], gradients: Gradients
    ) -> None:
        """By the errors of the dense expression in this dtype, and a rounding of the result."""
        eps = 2.0**-10 if dtype == torch.float32 else torch.finfo(dtype).eps  # TF32's
        for k, (found, exact) in enumerate(zip(outputs, self.expected, strict=True)):
            self.values[k] = FACTOR * _error(found, exact) + 1e-5 * (1 + _size(exact))
            if dtype == torch.float32:
                # Label smoothing's mean logit is no part of the sweep, whose products are TF32's.
                share = case.get("options", {}).get("label_smoothing", 0.0)
                self.values[k] += eps * share * case["scale"] * self.length**2
        floor = 1e-6 * (1 + abs(case["upstream"])) * (1 + case["scale"])
        # A part of the gradient (label smoothing's), or a sum of terms of both signs whose dS was
        # rounded; a loss is a mean over its rows.
        part = abs(case["upstream"]) / (sum(case["rows"]) if case["call"] in LOSSES else 1)
        floor += eps * part * case["scale"] * self.length
        for key, exact in self.wanted.items():
            own = FACTOR * _error(gradients[key], exact)
            least = floor
            if key[0] == "scale":
                # A sum over all pairs that may cancel, of terms whose dS was rounded; the gradient
                # of a temperature is scale² times that of the scale.
                cancelled = eps * abs(case["upstream"]) * self.length**2 * sum(case["rows"]) ** 0.5
                least = (floor + cancelled) * (1 + case["scale"])
            self.gradients[key] = own + 4 * eps * _size(exact) + least


def _error(a: Tensor, b: Tensor) -> float:
    return _size((a.detach().double() - b.detach()).nan_to_num(0.0))


def _size(values: Tensor) -> float:
    finite = values.detach()[values.isfinite()]
    return finite.abs().max().item() if finite.numel() else 0.0


def _compare_values(
    case: Case, rank: int, found: list[Tensor], expected: list[Tensor], limits: Limits
) -> None:
    if len(found) != len(expected):
        raise WrongError(f"{len(found)} results instead of {len(expected)}")
    for k, (ours, exact) in enumerate(zip(found, expected, strict=True)):
        value = ours.detach().double()
        if ours.dim():
            exact = exact.split(rows_of(case, k, len(found)))[rank]
        elif case["ranks"] > 1:
            dist.all_reduce(value)
            value = value / case["ranks"] if case["call"] in LOSSES else value
        _compare(f"result {k}", value, exact, limits.values[k])


def _compare_topk(case: Case, rank: int, found: list[Tensor], expected: list[Tensor]) -> None:
    scores, indices = found
    best, everything = (values.split(case["rows"])[rank] for values in expected)
    _compare("scores", scores.double(), best, 0.0)
    real = scores > -torch.inf
    if not torch.equal(indices >= 0, real):
        raise WrongError("indices: expected -1 where scores are -inf, and only there")
    at = everything.gather(1, indices.clamp(min=0)).masked_fill(~real, -torch.inf)
    _compare("scores at the indices", at, best, 0.0)
    for row, kept in zip(indices, real, strict=True):
        if len(row[kept].unique()) != int(kept.sum()):
            raise WrongError("indices: one column twice")


def _compare_gradients(case: Case, found: Gradients, wanted: Gradients, limits: Limits) -> None:
    """A loss's mean over ranks is compared, as DDP averages; of other functions their sum."""
    world, mean = case["ranks"], case["call"] in LOSSES
    for (name, owner), gradient in found.items():
        exact = wanted[name, owner]
        if owner < 0:  # averaged over ranks by the library
            exact = exact if mean else exact / world
        elif mean:
            exact = exact * world
        _compare(f"gradient of {name}", gradient, exact, limits.gradients[name, owner] * world)


def _compare(what: str, ours: Tensor, exact: Tensor, limit: float) -> None:
    if ours.shape != exact.shape:
        raise WrongError(f"{what}: shape {tuple(ours.shape)} instead of {tuple(exact.shape)}")
    ours, exact = ours.double(), exact.detach().double()
    difference = (ours - exact).masked_fill(exact.isinf() & (ours == exact), 0.0).abs()
    if not bool((difference <= limit).all()):  # nor if it is NaN
        worst = int(difference.nan_to_num(torch.inf).argmax())
        values = ours.reshape(-1)[worst].item(), exact.reshape(-1)[worst].item()
        raise WrongError(
            f"{what}: {values[0]!r} instead of {values[1]!r} at {worst}, allowed {limit:.3g}"
        )
