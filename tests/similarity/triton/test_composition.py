"""The fused kernels under torch.compile, CUDA graphs, streams and autocast; all on a GPU."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import megabatch as mb
from megabatch import similarity
from tests.process_state import changed

pytestmark = pytest.mark.gpu
Loss = Callable[..., Tensor]


#: Losses of (x, y, scale, bias).
LOSSES = {"clip": lambda x, y, scale, bias: mb.ClipLoss()(x, y, scale), "siglip": mb.SigLipLoss()}
of_loss = pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)


def make(b: int = 1000, d: int = 96, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    inputs = [F.normalize(torch.randn(b, d, device="cuda"), dim=1).to(dtype) for _ in range(2)]
    numbers = [torch.tensor(v, device="cuda") for v in (20.0, -10.0)]
    return [t.requires_grad_() for t in inputs] + numbers


def gradients(call, inputs: list[Tensor]) -> list[Tensor]:  # type: ignore[no-untyped-def]
    mine = [t.detach().clone().requires_grad_() for t in inputs]
    loss = call(*mine)
    loss.backward()
    return [loss.detach(), *(t.grad for t in mine if t.grad is not None)]


def assert_equal(ours: list[Tensor], truth: list[Tensor], tolerance: float = 0.0) -> None:
    for a, b in zip(ours, truth, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance * float(b.abs().max()))


@pytest.mark.parametrize(
    ("name", "tolerance"),
    # torch.compile's code for CLIP's pairs differs in float32's last bits, so a gradient may be
    # rounded to the next number in bfloat16. SigLIP's pairs are in its kernel.
    [("clip", 2**-7), ("siglip", 1e-5)],
)
def test_a_compiled_step_has_no_graph_break_and_the_same_gradients(
    name: str, tolerance: float
) -> None:
    loss, inputs = LOSSES[name], make()
    compiled = torch.compile(lambda *a: loss(*a), fullgraph=True)
    ours, truth = gradients(compiled, inputs), gradients(loss, inputs)
    assert_equal(ours[::3], truth[::3], 1e-5)  # the loss, the scale's gradient: float32
    assert_equal(ours[4:], truth[4:], 1e-5)  # the bias's
    assert_equal(ours[1:3], truth[1:3], tolerance)


def test_graphed_callables_compute_the_same() -> None:
    loss, sample = mb.ClipLoss(), [t.detach().requires_grad_() for t in make()[:3]]
    graphed = torch.cuda.make_graphed_callables(lambda *a: loss(*a), tuple(sample))
    for _ in range(2):
        inputs = make()[:3]
        assert_equal(gradients(graphed, inputs), gradients(loss, inputs))


@of_loss
def test_a_cuda_graph_replays_forward_and_backward(loss: Loss) -> None:
    inputs = make()
    static = [t.detach().clone().requires_grad_() for t in inputs]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # compile and allocate first, off the default stream
        for _ in range(2):
            for t in static:
                t.grad = None
            loss(*static).backward()
    torch.cuda.current_stream().wait_stream(stream)
    for t in static:
        t.grad = None
    gc.collect()  # a graph of another test that is freed during the capture ends it
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        value = loss(*static)
        value.backward()
    replayed = make()
    with torch.no_grad():
        for t, other in zip(static, replayed, strict=True):
            t.copy_(other)
    graph.replay()
    found = [value.detach(), *(t.grad for t in static if t.grad is not None)]
    assert_equal(found, gradients(loss, replayed))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_device_that_is_not_the_current_one() -> None:
    x, y, *numbers = make()
    elsewhere = [t.detach().to("cuda:1") for t in (x, y, *numbers)]
    for loss in LOSSES.values():
        here = gradients(loss, [x, y, *numbers])
        assert_equal([t.cpu() for t in gradients(loss, elsewhere)], [t.cpu() for t in here])
    target = torch.arange(len(x), device="cuda")
    for name, more in (("ranks", target), ("topk", 5)):
        function = getattr(similarity, name)
        there = function(*elsewhere[:2], more if name == "topk" else target.to("cuda:1"))
        for a, b in zip(there, function(x, y, more), strict=True):
            assert torch.equal(a.cpu(), b.cpu())


@of_loss
def test_another_stream(loss: Loss) -> None:
    inputs = make()
    truth = gradients(loss, inputs)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        ours = gradients(loss, inputs)
    torch.cuda.synchronize()
    assert_equal(ours, truth)


def test_autocast_casts_features_as_it_does_for_a_product() -> None:
    x, y, scale, _ = make(dtype=torch.float32)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        ours = gradients(mb.ClipLoss(), [x, y, scale])
    assert ours[1].dtype == torch.float32
    truth = gradients(mb.ClipLoss(), [x.bfloat16(), y.bfloat16(), scale])
    assert_equal(ours, [truth[0], truth[1].float(), truth[2].float(), truth[3]])


def test_float32_follows_the_precision_setting() -> None:
    x, y, scale, _ = make(dtype=torch.float32)
    truth = gradients(mb.ClipLoss(), [x.double(), y.double(), scale.double()])
    for setting, tolerance in (("highest", 2e-5), ("high", 2e-3)):
        with changed("precision", setting):
            ours = gradients(mb.ClipLoss(), [x, y, scale])
        for a, b in zip(ours, truth, strict=True):
            assert (a - b).norm() <= tolerance * b.norm()


@pytest.mark.parametrize("long_side", ["x", "y"])
def test_offsets_past_two_to_the_31_elements(long_side: str) -> None:
    """4,300,000 × 512 features: their last elements lie past 2^31."""
    n, d, m = 4_300_000, 512, 300
    long = torch.empty(n, d, device="cuda", dtype=torch.bfloat16)
    for i in range(0, n, 100_000):
        long[i : i + 100_000] = F.normalize(torch.randn(100_000, d, device="cuda"), dim=1)
    short = F.normalize(torch.randn(m, d, device="cuda"), dim=1).bfloat16().requires_grad_()
    long.requires_grad_()
    x, y = (long, short) if long_side == "x" else (short, long)
    rows, columns = similarity.logsumexp(x, y, 20.0)
    assert columns is not None
    of_long, of_short = (rows, columns) if long_side == "x" else (columns, rows)
    (of_long.sum() + of_short.sum()).backward()
    last = slice(n - 1000, n)
    s = 20.0 * long[last].double() @ short.double().T
    torch.testing.assert_close(of_long[last].double(), s.logsumexp(1), rtol=0, atol=1e-4)
    ds = (s - s.logsumexp(1, keepdim=True)).exp() + (s - of_short.double()).exp()
    exact = 20.0 * ds @ short.double()
    assert (long.grad[last].double() - exact).norm() <= 4e-3 * exact.norm()
