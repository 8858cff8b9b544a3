"""Bytes and work counted without memory."""

import pytest
import torch
from torch.nn import functional as F

from megabatch.planning import counter as counting
from megabatch.planning.counter import counted, fake_copies

MIB = 1 << 20


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


def test_a_graph_keeps_what_its_backward_pass_needs():
    with counted() as counter:
        x = torch.empty(MIB, requires_grad=True)
        start = counter.start()
        y = x.exp().exp().sum()
        assert counter.live - start == 8 * MIB + 512
        y.backward()
        del y
        assert counter.live - start == 4 * MIB  # x.grad


def test_sizes_far_beyond_this_machine_and_devices_that_are_not_there():
    with counted() as counter:
        x = torch.empty(1 << 42, dtype=torch.uint8, device="cuda")
        (x + 1).sum()
    assert counter.peak == 2 << 42 | 512


def test_copies_of_a_module_share_what_its_parameters_share():
    first = torch.nn.Linear(4, 4)
    both = torch.nn.Sequential(first, first, torch.nn.BatchNorm1d(4)).requires_grad_(True)
    first.bias.requires_grad_(False)
    with counted():
        copies = fake_copies(both, torch.device("cpu"))
        assert copies["0.weight"] is copies["1.weight"]
        assert copies["0.weight"].requires_grad
        assert not copies["0.bias"].requires_grad
        assert "2.running_mean" in copies


def test_products_and_other_operations_count_apart():
    with counted() as counter:
        x, w = (torch.empty(shape, requires_grad=True) for shape in ((16, 32), (32, 64)))
        y = (x @ w).relu()
        y.backward(torch.empty_like(y))
    work, item = counter.work, 4
    assert (work.flops, work.kernels) == (3 * 2 * 16 * 32 * 64, 3)
    assert work.nbytes == 3 * item * (16 * 32 + 32 * 64 + 16 * 64)
    assert work.other_kernels == 2  # relu and its gradient; copies and views take nothing
    assert work.other_bytes == item * (2 + 3) * 16 * 64


def test_convolutions_count_apart_from_products():
    layer = torch.nn.Conv2d(3, 16, 4, stride=4, bias=False)
    with counted() as counter:
        layer(torch.empty(2, 3, 8, 8))
    assert (counter.work.flops, counter.work.convolved) == (0, 2 * 2 * 4 * 16 * 3 * 16)
    assert counter.work.nbytes >= 4 * (2 * 3 * 64 + 16 * 48 + 2 * 16 * 4)


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


def test_a_product_that_torch_cannot_count_is_an_error(monkeypatch):
    monkeypatch.delitem(counting._FORMULAS, "aten.bmm")
    with counted(), pytest.raises(LookupError, match=r"no formula for the work of aten\.bmm$"):
        torch.empty(2, 3, 4) @ torch.empty(2, 4, 5)


@pytest.mark.parametrize("name", ["baddbmm", "_scaled_mm", "mkldnn_linear", "_conv_depthwise2d"])
def test_names_of_operations_with_products(name):
    assert counting._PRODUCTS.search(f"aten.{name}")


@pytest.mark.parametrize(
    "name", ["upsample_bilinear2d", "_convert_weight_to_int4pack", "mul", "mv"]
)
def test_names_of_other_operations(name):
    assert not counting._PRODUCTS.search(f"aten.{name}")
