"""The blocks of models: found, checkpointed and compiled."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._inductor.config
from torch import Tensor, nn

from megabatch.models import create
from megabatch.models.blocks import blocks, checkpoint_activations, compile_blocks
from tests.models.tiny import TINY
from tests.training.toy import WIDTH, Block, toy


def test_blocks_are_the_repeated_modules_or_the_towers() -> None:
    assert [type(block) for block in blocks(toy())] == [Block] * 6
    glyph = create("glyph-small").module
    assert blocks(glyph) == [glyph.visual, glyph.text]


def test_the_first_layers_of_images_are_compiled_too(graphs: Counting) -> None:
    model = create(TINY).module.eval()
    pixels = torch.randint(0, 256, (3, 3, 32, 32), dtype=torch.uint8)
    expected = model.encode_image(pixels)  # type: ignore[operator]
    compile_blocks(model, backend=graphs)
    assert torch.equal(model.encode_image(pixels), expected)  # type: ignore[operator]
    assert len(graphs) == 3  # one of them of the blocks


def test_blocks_are_computed_again_and_compiled_under_their_own_names() -> None:
    images, texts = torch.randn(3, 3, 32, 32), torch.randint(1, 49_000, (3, 16))
    model = create(TINY).module.eval()
    expected = model(images, texts)["image_features"]
    names = list(model.state_dict())
    checkpoint_activations(model)
    passes: list[int] = []
    layers = [
        layer for block in blocks(model) for layer in block.modules() if type(layer) is nn.GELU
    ]
    hooks = [layer.register_forward_pre_hook(lambda *_: passes.append(1)) for layer in layers]
    sum(feature.sum() for feature in model(images, texts).values()).backward()
    assert len(passes) == 2 * len(blocks(model))  # forward, and again in the backward pass
    for hook in hooks:
        hook.remove()
    compile_blocks(model, backend="eager")
    torch.testing.assert_close(model(images, texts)["image_features"], expected)
    assert list(model.state_dict()) == names


class Dropping(nn.Module):
    """A tower of two blocks with dropout."""

    def __init__(self) -> None:
        super().__init__()
        block = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Dropout(0.5))
        self.blocks = nn.ModuleList([block, copy.deepcopy(block)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.usefixtures("graphs")
def test_dropout_is_the_same_with_and_without_gradients(checkpointed: bool, device: str) -> None:
    """Both passes of gradient caching need this of any compiler; here it is inductor."""
    model, x = Dropping().to(device), torch.randn(16, 8, device=device)
    with torch._inductor.config.patch(fallback_random=False):
        if checkpointed:
            checkpoint_activations(model)
        compile_blocks(model)
        outputs = []
        for mode in (torch.no_grad(), torch.enable_grad()):
            torch.manual_seed(0)
            with mode:
                outputs.append(model(x))
        outputs[1].sum().backward()
    assert 0.3 < (outputs[0] == 0).double().mean() < 0.7
    torch.testing.assert_close(*outputs)


class Counting(list[Any]):
    """A backend that runs graphs as they are, and the inputs of each graph that it got."""

    def __call__(self, graph: Any, inputs: list[Any]) -> Any:
        self.append(inputs)
        return graph.forward


@pytest.fixture
def graphs(no_graphs: None) -> Iterator[Counting]:
    with torch._dynamo.config.patch(recompile_limit=8):  # torch's own, which a model may raise
        yield Counting()


def test_blocks_share_a_graph_per_tower_and_number_of_rows(graphs: Counting) -> None:
    model = toy()
    compile_blocks(model, ["text"], backend=graphs)
    for rows in (5, 3, 4, 5):
        model(*torch.randn(2, rows, WIDTH, dtype=torch.float64))
    assert len(graphs) == 3 + 1  # each number of rows of images; texts once


def test_blocks_with_constants_of_their_own_are_all_compiled(graphs: Counting) -> None:
    class Scaled(nn.Module):
        def __init__(self, rate: float) -> None:
            super().__init__()
            self.rate, self.linear = rate, nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.rate * self.linear(x)

    model = nn.Module()
    model.visual = nn.Sequential(*(Scaled(i / 10) for i in range(10)))
    compile_blocks(model, backend=graphs)
    model.visual(torch.ones(3, 2))
    assert len(graphs) == 10
