"""The blocks of models: found, checkpointed and compiled."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

from megabatch.models import create
from megabatch.models.blocks import blocks, checkpoint_activations, compile_blocks
from tests.models.tiny import TINY
from tests.training.toy import Block, toy


def test_blocks_are_the_repeated_modules() -> None:
    assert [type(block) for block in blocks(toy())] == [Block] * 6


def test_blocks_of_real_models() -> None:
    vit = create(TINY).module
    names = {module: name for name, module in vit.named_modules()}
    assert {names[block].rpartition(".")[0] for block in blocks(vit)} == {
        "visual.transformer.resblocks",
        "transformer.resblocks",
    }
    glyph = create("glyph-small").module
    assert blocks(glyph) == [glyph.visual, glyph.text]


def test_blocks_are_computed_again_and_compiled_under_their_own_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiled = functools.partialmethod(nn.Module.compile, backend="eager")
    monkeypatch.setattr(nn.Module, "compile", compiled)
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
    compile_blocks(model)
    torch.testing.assert_close(model(images, texts)["image_features"], expected)
    assert list(model.state_dict()) == names
