"""Bytes counted without memory."""

import torch

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


def test_what_an_operation_takes_inside_counts_while_it_runs():
    with counted(lambda op, args: 3 * MIB if op.name().startswith("aten::exp") else 0) as counter:
        x = torch.empty(MIB, dtype=torch.uint8)
        counter.start()
        x.exp()
        assert counter.peak == MIB + 4 * MIB + 3 * MIB


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
