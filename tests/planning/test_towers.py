"""What is counted for a micro-batch, against what the allocator gave out for a real one."""

import pytest
import torch
from torch.nn import functional as F

from megabatch.planning import towers
from megabatch.planning.towers import Sample, counted, measure, sample_of
from tests.planning.allocator import peak_bytes

MIB = 1 << 20


@pytest.mark.parametrize(("precision", "texts"), [("fp32", 1), ("bf16", 1), ("fp32", 3)])
def test_forward_and_backward_pass_as_counted(glyph, precision, texts):
    module, sample, size = glyph.module.train(), sample_of(glyph, texts), 256
    inputs = [tensor.fill_(1) for tensor in sample.empty(size, torch.device("cpu"))]
    assert [len(tensor) for tensor in inputs] == [size, texts * size]
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)

    def run():
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            outputs = [value for value in module(*inputs).values() if value is not None]
            torch.autograd.backward(outputs, [torch.ones_like(value) for value in outputs])

    actual = peak_bytes(run)
    module.zero_grad()
    expected = measure(module, sample, size, "cpu", precision)
    assert abs(expected.peak - actual) < 0.05 * actual  # found: 1%
    assert expected.forward < expected.kept < expected.peak


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_graph_grows_in_a_straight_line(glyph, device):
    kept = [measure(glyph.module, sample_of(glyph), n, device, "bf16").kept for n in (64, 128, 192)]
    assert abs((kept[2] - kept[1]) - (kept[1] - kept[0])) < 0.01 * kept[0]


@pytest.mark.skipif(torch.cuda.is_available(), reason="has the device that is to be missing")
def test_before_pytorch_2_10_an_absent_gpu_is_counted_as_the_cpu(glyph, monkeypatch):
    sample = sample_of(glyph)
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion("2.9.1+cpu"))
    there, here = (measure(glyph.module, sample, 64, name, "fp32") for name in ("cuda", "cpu"))
    assert there == here


def test_attention_on_a_gpu_that_is_not_there_takes_no_square(glyph):
    class Attention(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.visual = torch.nn.MultiheadAttention(64, 2, batch_first=True)

        def forward(self, image=None, text=None):
            if image is None:
                return {}
            features = self.visual(image, image, image, need_weights=False)[0].mean(1)
            return {"image_features": features}

    kept = []
    for length in (512, 1024):
        inputs = {**sample_of(glyph).inputs, "image": torch.empty(length, 64)}
        sample = Sample(inputs)
        kept.append(measure(Attention(), sample, 4, "cuda", "bf16").kept)
    assert kept[1] < 2.1 * kept[0]


def test_the_run_draws_the_same_random_numbers_after_a_plan(glyph):
    before = torch.get_rng_state()
    sample = sample_of(glyph)
    measure(glyph.module, sample, 4, "cpu", "bf16")
    assert torch.equal(torch.get_rng_state(), before)
    assert sample.nbytes == 32 * 32 + 8 * 64
    assert not torch.is_autocast_enabled("cpu")


# --- the counter ----------------------------------------------------------------------------------


def test_live_and_peak_of_operations_and_views():
    with counted() as counter:
        a = torch.empty(MIB, dtype=torch.uint8)
        start = counter.start()
        assert start == MIB
        b = a.float()  # 4 MiB
        c = b[::2]
        c.mul_(2)
        assert (counter.live - start, counter.peak - start) == (4 * MIB, 4 * MIB)
        d = b + 1
        del d
        assert (counter.live - start, counter.peak - start) == (4 * MIB, 8 * MIB)
        del b
        assert counter.live - start == 4 * MIB  # a view of it is left
        del c
        assert counter.live == start


def test_products_convolutions_and_other_operations_count_apart():
    with counted() as counter:
        x, w = (torch.empty(shape, requires_grad=True) for shape in ((16, 32), (32, 64)))
        y = (x @ w).relu()
        y.backward(torch.empty_like(y))
    work, item = counter.work, 4
    assert (work.flops, work.kernels) == (3 * 2 * 16 * 32 * 64, 3)
    assert work.nbytes == 3 * item * (16 * 32 + 32 * 64 + 16 * 64)
    assert work.other_kernels == 2  # relu and its gradient; copies and views take nothing
    assert work.other_bytes == item * (2 + 3) * 16 * 64
    with counted() as counter:
        torch.nn.Conv2d(3, 16, 4, stride=4, bias=False)(torch.empty(2, 3, 8, 8))
    assert (counter.work.flops, counter.work.convolved) == (0, 2 * 2 * 4 * 16 * 3 * 16)


@pytest.mark.parametrize(("length", "keys", "tiles"), [(1, 1, 1), (128, 257, 3), (129, 100, 2)])
def test_attention_counts_whole_tiles(length, keys, tiles):
    query = torch.empty(2, 3, length, 32, requires_grad=True)
    key = torch.empty(2, 3, keys, 32)
    with counted() as counter:
        output = F.scaled_dot_product_attention(query, key, key)
        forward = counter.work
        counter.start()
        output.backward(output)
    products = 2 * 2 * 3 * 128 * 128 * 32 * tiles
    assert forward.flops == pytest.approx(2 * products, rel=1e-6)
    assert counter.work.flops == pytest.approx(5 * products, rel=1e-6)


@pytest.mark.parametrize(("length", "tile"), [(5, 16), (50, 64), (64, 64), (128, 128), (257, 272)])
def test_attention_by_own_kernels_counts_their_blocks(length, tile):
    pytest.importorskip("triton", reason="they are Triton kernels")
    from megabatch.models.block_attention import block_attention
    from megabatch.models.short_attention import LONGEST, short_attention

    short = length <= LONGEST
    with counted() as counter:
        qkv = torch.empty(4, length, 3, 2, 32, dtype=torch.float16, requires_grad=True)
        counter.start()
        output = short_attention(qkv, True) if short else block_attention(qkv, True)[0]
        forward = counter.work
        counter.start()
        output.backward(output)
    product = 2 * 4 * 2 * 32 * tile**2
    assert forward.flops == 2 * product
    assert counter.work.flops == (5 if short else 7) * product
    statistics = 0 if short else 4 * 4 * 2 * length
    assert forward.nbytes == qkv.nbytes + output.nbytes + statistics


def test_a_product_that_torch_cannot_count_is_an_error(monkeypatch):
    monkeypatch.delitem(towers._FORMULAS, "aten.bmm")
    with counted(), pytest.raises(LookupError, match=r"no formula for the work of aten\.bmm$"):
        torch.empty(2, 3, 4) @ torch.empty(2, 4, 5)
