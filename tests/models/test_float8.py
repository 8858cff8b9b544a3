"""Float8 products in the towers' blocks, emulated on the CPU."""

from __future__ import annotations

import copy
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.torch_version import TorchVersion

from megabatch.errors import UsageError
from megabatch.imports import MissingLibrary
from megabatch.models import create
from megabatch.models.blocks import compile_blocks
from megabatch.models.float8 import check_float8, float8_layers, use_float8
from megabatch.planning.towers import _autocast
from tests.models.test_blocks import Counting
from tests.models.tiny import TINY

CUDA = torch.device("cuda")


@pytest.fixture(scope="module", autouse=True)
def _torchao() -> None:
    pytest.importorskip("torchao.float8", exc_type=ImportError)  # not with torch 2.9


def in_float8(module: nn.Module) -> Any:
    converted = copy.deepcopy(module)
    use_float8(converted, emulate=True)
    return converted


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    return create(TINY).module.eval()


@pytest.fixture
def inputs() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(5, 3, 32, 32), torch.randint(1, 49_000, (5, 16))


def test_parameters_stay_the_same_objects_by_their_names(model: Any) -> None:
    own = copy.deepcopy(model)
    before = dict(own.named_parameters(remove_duplicate=False))
    use_float8(own, emulate=True)
    after = dict(own.named_parameters(remove_duplicate=False))
    assert list(after) == list(before)
    assert all(after[name] is before[name] for name in before)
    assert list(own.state_dict()) == list(model.state_dict())


def test_layers_in_blocks_only_of_sizes_that_fit(model: Any) -> None:
    mlp = [f"resblocks.0.mlp.{name}" for name in ("c_fc", "c_proj")]
    names = [f"{tower}transformer.{name}" for tower in ("visual.", "") for name in mlp]
    assert sorted(float8_layers(model)) == sorted(names)
    changed = copy.deepcopy(model)
    changed.transformer.resblocks[0].mlp.c_fc = nn.Linear(16, 40)
    changed.transformer.resblocks[0].mlp.c_proj = nn.Linear(40, 16)
    assert sorted(float8_layers(changed)) == sorted(names[:2])
    assert not float8_layers(create("glyph-small").module)  # no blocks: its last layers project


def gradients(module: Any, inputs: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    """Features, and gradients of their sum with random factors, by name."""
    module.zero_grad()
    features = {n: f for n, f in module(*inputs).items() if n.endswith("features")}
    generator = torch.Generator().manual_seed(2)
    factors = [torch.randn(f.shape, generator=generator).to(f) for f in features.values()]
    torch.autograd.backward(list(features.values()), factors)
    named = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    return {**features, **named}


def test_errors_are_those_of_three_bits_of_mantissa(
    model: Any, inputs: tuple[Tensor, Tensor]
) -> None:
    exact = gradients(copy.deepcopy(model).double(), (inputs[0].double(), inputs[1]))
    for name, found in gradients(in_float8(model), inputs).items():
        error = (found - exact[name]).norm() / exact[name].norm()
        assert error < 0.15, name  # a value rounds by up to 1/16, in products one after another
        assert error > 1e-4, name


def test_rows_do_not_depend_on_others(model: Any, inputs: tuple[Tensor, Tensor]) -> None:
    converted, images, texts = in_float8(model), *inputs
    louder = torch.cat([images[:2], 100 * images[2:]])
    with torch.no_grad():
        alone, beside = converted(images[:2], texts[:2]), converted(louder, texts)
    for tower in ("image_features", "text_features"):
        torch.testing.assert_close(beside[tower][:2], alone[tower], atol=1e-6, rtol=0)


@pytest.mark.usefixtures("no_graphs")
def test_compiled_blocks_compute_the_same(model: Any, inputs: tuple[Tensor, Tensor]) -> None:
    converted = in_float8(model)
    with _autocast("cuda", "bf16"):
        expected = gradients(converted, inputs)
        expected = {name: value.detach().clone() for name, value in expected.items()}
        compile_blocks(converted, ["text"], backend="eager")
        for name, found in gradients(converted, inputs).items():
            assert torch.equal(found, expected[name]), name
        longer = torch.randint(1, 49_000, (3, 12))
        assert converted.encode_text(longer).isfinite().all()


class Mixer(nn.Module):
    """A block whose layer gets a view."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.transpose(1, 2)).transpose(1, 2)


@pytest.mark.usefixtures("no_graphs")
def test_blocks_share_a_graph() -> None:
    model, graphs = nn.Module(), Counting()
    model.visual = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(4)))
    use_float8(model, emulate=True)
    compile_blocks(model, backend=graphs)
    with _autocast("cuda", "bf16"):
        model.visual(torch.randn(5, 32, dtype=torch.bfloat16, requires_grad=True))
    assert len(graphs) == 1


def test_inputs_that_are_views_are_taken() -> None:
    model = nn.Module()
    model.visual = nn.Sequential(Mixer(), Mixer())
    x = torch.randn(2, 32, 5)
    found = in_float8(model).visual(x)
    assert (found - model.visual(x)).norm() < 0.06 * model.visual(x).norm()


def test_what_is_refused_and_what_is_told(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = "--precision fp8: expected a GPU of compute capability 8.9 or later, got"
    with pytest.raises(UsageError, match=f"^{expected} the CPU"):
        check_float8(model, torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    with pytest.raises(UsageError, match=f"^{expected} NVIDIA A100"):
        check_float8(model, CUDA)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 9))
    # Of 12 weights by the square of the width, a block's MLP has 8.
    told = "products with 67% of the weights of the towers' blocks are in float8"
    assert check_float8(model, CUDA) == told
    with pytest.raises(UsageError, match=r"^--precision fp8: expected repeated blocks, with li"):
        check_float8(create("glyph-small").module, CUDA)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "__version__", TorchVersion("2.9.1"))
        with pytest.raises(
            UsageError, match=r"^--precision fp8: expected torch 2.10 or later, got 2"
        ):
            check_float8(model, CUDA)
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(MissingLibrary, match=r"^torchao is not installed.*'megabatch\[fp8\]'"):
        check_float8(model, CUDA)


@pytest.mark.usefixtures("no_graphs")
def test_inductor_rounds_alike_with_and_without_gradients(model: Any) -> None:
    compiled = torch.compile(in_float8(model).visual.transformer.resblocks[0])
    with _autocast("cuda", "bf16"):
        x = torch.randn(64, 17, 16, generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            first = compiled(x)
        second = compiled(x.requires_grad_())
    assert second.requires_grad
    assert torch.equal(first, second)
