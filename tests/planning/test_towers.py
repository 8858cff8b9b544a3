"""What is counted for a micro-batch, against what the allocator gave out for a real one."""

import pytest
import torch

from megabatch.models.layers import lock
from megabatch.planning.towers import Sample, measure, sample_of
from tests.planning.allocator import peak_bytes


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


def test_a_locked_tower_leaves_no_graph():
    from megabatch.models import create

    towers = create("glyph-small")
    sample = sample_of(towers)
    both = measure(towers.module, sample, 64, "cpu", "fp32")
    lock(towers.module, "image")
    text = measure(towers.module, sample, 64, "cpu", "fp32")
    assert text.kept < 0.2 * both.kept  # the convolutions' activations are most of it


def test_the_run_draws_the_same_random_numbers_after_a_plan(glyph):
    before = torch.get_rng_state()
    sample = sample_of(glyph)
    measure(glyph.module, sample, 4, "cpu", "bf16")
    assert torch.equal(torch.get_rng_state(), before)
    assert sample.nbytes == 32 * 32 + 8 * 64
    assert not torch.is_autocast_enabled("cpu")
