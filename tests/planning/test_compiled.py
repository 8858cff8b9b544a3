"""Blocks counted as compiled ones, against what torch.compile's own partition keeps."""

import pytest
import torch
from torch.nn import functional as F

from machinery.icon_towers import Block
from megabatch.planning import work
from megabatch.planning.compiled import CompiledBlocks, compiled_graphs
from megabatch.planning.counter import UNIT, counted, fake_copies
from megabatch.planning.towers import measure, sample_of
from megabatch.planning.work import UncountedWork


class Blocks(torch.nn.Module):
    def __init__(self, count):
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block(64, 4) for _ in range(count))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def test_a_block_keeps_what_the_compiler_would_keep():
    """Really divided by torch, with operations that run one by one; nothing is generated."""
    block, x = Block(64, 4), torch.randn(8, 16, 64, requires_grad=True)
    compiled = torch.compile(block, backend="aot_eager_decomp_partition")
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    own = {t.untyped_storage().data_ptr() for t in (x, *block.parameters())}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = compiled(x)
    own.add(output.untyped_storage().data_ptr())
    real = sum(size for key, size in kept.items() if key not in own)

    with counted():
        weights = fake_copies(block, torch.device("cpu"))
        inputs = [*weights.values(), torch.empty(8, 16, 64, requires_grad=True)]

        def call(*given):
            state = dict(zip(weights, given, strict=False))
            return torch.func.functional_call(block, state, (given[-1],))

        graphs = compiled_graphs(call, inputs)
    assert abs(sum(graphs.kept) - real) < 0.02 * real
    assert [g is None for g in graphs.gradients] == [False] * len(inputs)


def test_kept_tensors_count_until_the_backward_pass_has_used_them():
    model = Blocks(3)
    with counted() as counter:
        compiled = CompiledBlocks()
        with compiled.of(model, counter):
            x = torch.empty(8, 16, 64)
            levels = []
            for count in (1, 2, 3):
                part = torch.nn.Sequential(*model.blocks[:count])
                before = counter.live
                output = part(x)
                levels.append(counter.live - before)
                output.backward(torch.empty_like(output))
                del output
                gradients = sum(-(-p.nbytes // UNIT) * UNIT for p in part.parameters())
                assert counter.live - before == gradients
                for p in part.parameters():
                    p.grad = None
    assert not compiled.failed
    assert levels[2] - levels[1] == levels[1] - levels[0] > 8 * 16 * 64 * 4
    assert all("forward" not in vars(block) for block in model.blocks)


def test_without_gradients_nothing_is_kept_and_products_count():
    model = Blocks(1)
    with counted() as counter, CompiledBlocks().of(model, counter), torch.no_grad():
        before, work = counter.start(), counter.work
        output = model(torch.empty(8, 16, 64))
        assert counter.live - before == output.nbytes
        work = counter.work - work
    products = 2 * 8 * 16 * 64 * (3 + 1 + 4 + 4) * 64
    attention = 2 * 2 * 8 * 128 * 128 * 64  # a tile of queries and keys, though there are 16
    assert work.flops == products + attention
    # Weights, inputs and outputs of four products and of attention; little else in memory.
    rows = 8 * 16 * 4
    assert work.nbytes >= 4 * 12 * 64 * 64 + rows * 64 * (1 + 3 + 3 + 1 + 1 + 1 + 1 + 4 + 4 + 1)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_compiled_towers_take_less_and_read_less(glyph, device):
    sample = sample_of(glyph)
    eager = measure(glyph.module, sample, 32, device, "bf16")
    compiled = measure(glyph.module, sample, 32, device, "bf16", CompiledBlocks())
    assert compiled.kept < eager.kept
    for name in ("encode", "record", "backward"):
        own, other = getattr(compiled, name), getattr(eager, name)
        assert own.flops == pytest.approx(other.flops, rel=0.02)
        assert own.nbytes < other.nbytes
        assert own.kernels < other.kernels


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
        start = counter.work
        output = F.scaled_dot_product_attention(query, key, key)
        forward = counter.work - start
        output.backward(output)
    products = 2 * 2 * 3 * 128 * 128 * 32 * tiles
    assert forward.flops == pytest.approx(2 * products, rel=1e-6)
    assert (counter.work - start - forward).flops == pytest.approx(5 * products, rel=1e-6)


def test_a_product_that_torch_cannot_count_is_an_error(monkeypatch):
    monkeypatch.delitem(work._FORMULAS, "aten.bmm")
    with counted(), pytest.raises(UncountedWork, match=r"no formula for the work of aten\.bmm$"):
        torch.empty(2, 3, 4) @ torch.empty(2, 4, 5)


@pytest.mark.parametrize("name", ["baddbmm", "_scaled_mm", "mkldnn_linear", "_conv_depthwise2d"])
def test_names_of_operations_with_products(name):
    assert work._PRODUCTS.search(f"aten.{name}")


@pytest.mark.parametrize(
    "name", ["upsample_bilinear2d", "_convert_weight_to_int4pack", "mul", "mv"]
)
def test_names_of_other_operations(name):
    assert not work._PRODUCTS.search(f"aten.{name}")
