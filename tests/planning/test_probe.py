"""The figures of a device, measured for a moment."""

import pytest
import torch

from megabatch.models import create
from megabatch.planning.probe import Probe, counted_passes
from megabatch.planning.towers import sample_of
from tests.models.tiny import TINY


def test_a_device_is_measured_with_blocks_of_both_towers():
    towers = create(TINY)
    probe = Probe(torch.device("cpu"), seconds=0.01, side=64, nbytes=1 << 16)
    gpu, encoding = probe.figures(towers, sample_of(towers), 2, "fp32", compiled=False)
    assert 1e6 < gpu.product_rate < 1e15
    assert 1e6 < gpu.memory_rate < 1e14
    assert 0 < encoding.products <= 1
    found = probe._inputs(towers.module, sample_of(towers), 2)
    assert len(found) == 2  # a block of images and one of texts
    assert not any(block._forward_pre_hooks for block, *_ in found)


def test_a_model_without_blocks_is_measured_with_its_towers():
    towers = create("glyph-small")  # which take bytes, and tokens
    probe = Probe(torch.device("cpu"), seconds=0.01, side=64, nbytes=1 << 16)
    _, encoding = probe.figures(towers, sample_of(towers), 2, "fp32", compiled=False)
    assert 0 < encoding.products <= 1
    assert len(probe._inputs(towers.module, sample_of(towers), 2)) == 2


@pytest.mark.parametrize("compiled", [False, True])
def test_the_work_of_both_passes_of_a_linear_layer(compiled):
    layer = torch.nn.Linear(32, 64, bias=False)
    work = counted_passes(layer, (torch.ones(16, 32),), {}, compiled=compiled)
    assert work.flops == 3 * 2 * 16 * 32 * 64  # forward, and a product for each gradient
    assert work.nbytes >= 4 * 3 * (16 * 32 + 32 * 64 + 16 * 64)
