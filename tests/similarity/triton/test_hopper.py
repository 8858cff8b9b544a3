"""The kernels for Hopper GPUs against float64 and against the kernels whose places they take."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megabatch import similarity
from tests.similarity import dense
from tests.similarity.test_statistics import some_ids
from tests.similarity.triton import DEVICE, GPU, HALVES, MARKS
from tests.similarity.triton.test_softmax import both, check, make

pytest.importorskip("triton")
from megabatch.similarity import backends
from megabatch.similarity.triton import hopper

pytestmark = MARKS
takes = hopper.takes
RUNS = GPU and hopper.past_binding and backends.capability(torch.device("cuda", 0)) == (9, 0)


def on_hopper(test: Any) -> Any:
    """Mark a test that launches the kernels."""
    skip = pytest.mark.skipif(not RUNS, reason="needs a Hopper GPU and a release of `TESTED`")
    return pytest.mark.gpu(skip(test))


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels take every block that they can; names of those launched."""
    names: list[str] = []
    monkeypatch.setattr(hopper, "takes", lambda x, block, items: takes(x, block, 1 << 30))
    for kernel in (hopper.unmasked_tiles, hopper.unmasked_gradients):

        def launch(
            *given: Any,
            launch: Any = kernel.launch,
            name: str = kernel.jitted.__name__,
            **named: Any,
        ) -> None:
            names.append(name)
            launch(*given, **named)

        monkeypatch.setattr(kernel, "launch", launch)
    return names


def results(x: Tensor, y: Tensor) -> list[Tensor]:
    """Log-sum-exps and gradients of a weighted sum of them."""
    mine = x.detach().requires_grad_(), y.detach().requires_grad_()
    sides = similarity.logsumexp(*mine, 20.0)
    total = sum((s * torch.linspace(0.5, 1.5, len(s), device=s.device)).sum() for s in sides)
    return [*(s.detach() for s in sides), *torch.autograd.grad(total, mine)]


@pytest.mark.parametrize(
    "changed",
    [{}, {"item": 4}, {"capability": (10, 0)}, {"capability": (8, 0)}, {"bk": 32},
     {"guide_x": "a guide"}, {"items": 131}, {"past_binding": False}, {"is_cuda": False}],
)  # fmt: skip
def test_what_they_take(changed: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    case: dict[str, Any] = {"item": 2, "is_cuda": True, "capability": (9, 0), "past_binding": True}
    case |= {"bk": 64, "guide_x": None, "items": 132} | changed
    monkeypatch.setattr(hopper, "capability", lambda device: case["capability"])
    monkeypatch.setattr(hopper, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(hopper, "past_binding", case["past_binding"])
    x: Any = SimpleNamespace(is_cuda=case["is_cuda"], device=0, element_size=lambda: case["item"])
    block: Any = SimpleNamespace(bk=case["bk"], guide_x=case["guide_x"])
    assert takes(x, block, case["items"]) is (not changed)


def test_programs_among_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper, "multiprocessors", lambda device: 132)
    assert hopper.programs(x := torch.empty(0), 1000) == 132
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    assert [hopper.programs(x, items) for items in (1000, 200)] == [264, 200]


@on_hopper
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    ("m", "n", "d"),
    [(1, 128, 8), (129, 300, 13), (1100, 640, 70), (2048, 2048, 64), (2500, 3333, 200)],
)
def test_any_sizes(m: int, n: int, d: int, dtype: torch.dtype, launches: list[str]) -> None:
    mine, theirs = both(*make("random", m, n, d, dtype), scale=30.0)
    check([similarity.logsumexp(*mine)], [dense.logsumexp(*theirs)], mine, theirs)
    assert set(launches) == {"unmasked_tiles", "unmasked_gradients"}


@on_hopper
@pytest.mark.parametrize("case", ["paired", "ids", "ceiling", "rows", "itself"])
def test_masks_and_sides(case: str, launches: list[str]) -> None:
    mine, theirs = both(*make("random", 1300, 1300, 72, torch.bfloat16), scale=20.0)
    if case == "itself":
        mine[1], theirs[1] = None, None  # type: ignore[call-overload]
    options: dict[str, Any] = {}
    if case == "ids":
        options["ids"] = tuple(t.to(DEVICE) for t in some_ids(1300, 1300, 200))
    limit = None
    if case == "ceiling":  # between two logits of a row, where rounding does not reach
        ordered = (theirs[0] @ theirs[1].T * theirs[2]).detach().sort().values
        limit = ordered[:, 1000:1002].mean(1).float()
    sides = "rows" if case == "rows" else "both"
    ours = similarity.split_logsumexp(*mine, ceiling=limit, sides=sides, **options)
    wide = None if limit is None else limit.double()
    truth = dense.split_logsumexp(*theirs, ceiling=wide, **options)
    if case == "rows":
        ours, truth = ours[:1], truth[:1]
    check(ours, truth, [t for t in mine if t is not None], [t for t in theirs if t is not None])
    assert set(launches) == {"unmasked_tiles", "unmasked_gradients"}


@on_hopper
def test_results_are_those_of_the_other_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Always the same bits; another kernel may round a few numbers the other way."""
    similarity.set_workspace(512 << 20)
    x, y = make("random", 8192, 8192, 256, torch.bfloat16)
    ours = results(x, y)
    assert all(map(torch.equal, ours, results(x, y)))
    monkeypatch.setattr(hopper, "takes", lambda *given: False)
    for a, b in zip(ours, results(x, y), strict=True):
        assert (a - b).double().norm() <= (1e-7 if a.dim() == 1 else 2**-8) * b.double().norm()


@on_hopper
def test_no_launch_waits_for_another(launches: list[str]) -> None:
    """In a graph, beside another stream, and with 300 shapes."""
    x, y = make("random", 4096, 4096, 128, torch.bfloat16)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        expected = results(x, y)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = results(x, y)
    for _ in range(3):
        graph.replay()
        with torch.cuda.stream(side):
            beside = results(x, y)
        torch.cuda.synchronize()
        assert all(map(torch.equal, expected, replayed))
        assert all(map(torch.equal, expected, beside))
    draw = random.Random(0)
    for _ in range(300):
        m, n, d = draw.randint(1, 3000), draw.randint(1, 3000), draw.choice((16, 64, 80, 128))
        assert all(bool(t.isfinite().all()) for t in results(x[:m, :d], y[:n, :d]))
