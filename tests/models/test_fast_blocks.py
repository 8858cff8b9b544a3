"""open_clip's transformers with fast blocks against their own forward passes, in float64."""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import pytest
import torch
from open_clip.model import CLIP, CustomTextCLIP
from torch import Tensor, nn

from megabatch.models import create
from megabatch.models.blocks import checkpoint_activations, compile_blocks, use_fast_blocks
from megabatch.models.fast_blocks import FastBlock
from megabatch.models.openclip import accept_short_texts
from tests.models.test_blocks import Counting
from tests.models.test_padding import CONTEXT, texts

GPU = torch.cuda.is_available()
SIZES: Any = {"width": 16, "layers": 2}
VISION = {**SIZES, "image_size": 16, "patch_size": 8, "head_width": 8, "ls_init_value": 0.5}
TEXT = {**SIZES, "context_length": CONTEXT, "vocab_size": 41, "heads": 2}


def model(kind: type[nn.Module] = CLIP, vision: dict[str, Any] | None = None, **text: Any) -> Any:
    torch.manual_seed(0)
    configurations = {"vision_cfg": VISION | (vision or {}), "text_cfg": TEXT | text}
    module = kind(embed_dim=8, **configurations).double()
    accept_short_texts(module)
    for name, parameter in module.named_parameters():
        if name.endswith("bias"):  # zeros at the start
            nn.init.normal_(parameter)
    return module


def fast(module: nn.Module) -> Any:
    made = copy.deepcopy(module)
    use_fast_blocks(made)
    assert list(made.state_dict()) == list(module.state_dict())
    return made


def are_fast(module: Any) -> tuple[bool, bool]:
    """Whether the blocks of both towers are, all or none."""
    found = []
    for tower in (module.visual, getattr(module, "text", module)):
        (kind,) = {type(block) for block in tower.transformer.resblocks}
        found.append(kind is FastBlock)
    return found[0], found[1]


def features(module: Any, columns: int = CONTEXT) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(4, 3, 16, 16, dtype=torch.float64, generator=generator)
    images = images.to(module.visual.conv1.weight)
    return [
        module.encode_image(images),
        module.encode_text(texts()[:, :columns].to(images.device)),
    ]


def compare(found: Any, expected: Any, columns: int = CONTEXT) -> None:
    """Both towers' features, and the gradients of all parameters."""
    made, gradients = [], []
    for module in (found, expected):
        made.append(features(module, columns))
        total = sum((f * torch.linspace(-1, 1, f.numel()).view_as(f)).sum() for f in made[-1])
        parameters = {n: p for n, p in module.named_parameters() if n != "logit_scale"}
        values = torch.autograd.grad(total, list(parameters.values()))
        gradients.append(dict(zip(parameters, values, strict=True)))
    torch.testing.assert_close(*made, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(*gradients, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("kind", [CLIP, CustomTextCLIP])
@pytest.mark.parametrize("text", [{}, {"pool_type": "eos", "eos_id": 40}, {"pool_type": "last"}])
def test_features_and_gradients_are_the_same(kind: type[nn.Module], text: dict[str, Any]) -> None:
    own = model(kind, **text)
    made = fast(own)
    assert are_fast(made) == (True, True)
    compare(made, own)
    if text != {"pool_type": "last"}:
        compare(made, own, 8)


def rows_of_last_mlp(module: Any) -> list[int]:
    """How many tokens of a sequence go through it, in both towers."""
    found: list[int] = []
    for tower in (module.visual, getattr(module, "text", module)):
        mlp = tower.transformer.resblocks[-1].mlp
        mlp.register_forward_pre_hook(lambda _, args: found.append(args[0].shape[1]))
    features(module)
    return found


@pytest.mark.parametrize("kind", [CLIP, CustomTextCLIP])
def test_the_last_block_computes_only_what_is_pooled(kind: type[nn.Module]) -> None:
    assert rows_of_last_mlp(model(kind)) == [5, CONTEXT]
    assert rows_of_last_mlp(fast(model(kind))) == [1, 1]
    assert rows_of_last_mlp(fast(model(kind, pool_type="first"))) == [1, CONTEXT]


@pytest.mark.parametrize("vision", [{"pool_type": "avg"}, {"attentional_pool": True}])
def test_other_poolings_of_images_need_all_tokens(vision: dict[str, Any]) -> None:
    own = model(vision=vision | {"attn_pooler_heads": 2})
    made = fast(own)
    compare(made, own)
    assert rows_of_last_mlp(made) == [5, 1]


def test_towers_that_return_tokens_compute_them() -> None:
    own = model(CustomTextCLIP, {"output_tokens": True}, output_tokens=True)
    made = fast(own)
    for found, expected in zip(features(made), features(own), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_checkpointing_of_open_clips_own_stays() -> None:
    own = model()
    own.set_grad_checkpointing()
    made = fast(own)
    assert not made.transformer.resblocks[-1].pools
    assert type(made.transformer) is type(own.transformer)
    for a, b in zip(features(made.train()), features(own.train()), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_texts_without_a_mask() -> None:
    own = model(CustomTextCLIP, no_causal_mask=True)
    made = fast(own)
    assert are_fast(made) == (True, True)
    compare(made, own)


def test_other_transformers_are_left_alone() -> None:
    assert are_fast(fast(model(vision={"qk_norm": True}, scale_heads=True))) == (False, False)
    own = model(CustomTextCLIP, no_causal_mask=True)
    own.text.use_pad_mask = True
    own.visual.transformer.resblocks[1].attn.dropout = 0.1
    assert are_fast(fast(own)) == (False, False)
    assert are_fast(fast(model(CustomTextCLIP, embed_cls=True))) == (True, False)
    assert are_fast(fast(model(type("Other", (CLIP,), {})))) == (True, False)
    use_fast_blocks(create("glyph-small").module)


@pytest.mark.usefixtures("no_graphs")
def test_compiled_and_computed_again() -> None:
    own = model()
    made = fast(own)
    checkpoint_activations(made)
    compile_blocks(made, {"text"}, backend="aot_eager")
    for columns in (CONTEXT, 8):
        compare(made, own, columns)


@pytest.mark.usefixtures("no_graphs")
def test_texts_of_all_lengths_share_two_graphs() -> None:
    """The last block has one, all others share the second."""
    made, graphs = fast(model(layers=3)), Counting()
    compile_blocks(made, {"text"}, backend=graphs)
    with torch.no_grad():
        for rows, columns in ((5, 12), (4, 8), (3, 9)):  # torch relates equal sizes
            made.encode_text(texts()[:rows, :columns])
    assert len(graphs) == 2


@pytest.mark.usefixtures("no_graphs")
def test_kernels_of_inductor_in_half_precision() -> None:
    own = model()
    exact = own.encode_text(texts())
    made = fast(own.float())
    compile_blocks(made, {"text"})
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        found, before = (module.encode_text(texts()) for module in (made, own))
    limit = 1.5 * (before - exact).norm()
    assert (found - exact).norm() < limit < 0.05 * exact.norm()


@pytest.mark.usefixtures("no_graphs")
@pytest.mark.parametrize(
    ("device", "backend"),
    [
        pytest.param("cpu", "eager", marks=pytest.mark.skipif(GPU, reason="no interpreter")),
        pytest.param("cuda", "inductor", marks=pytest.mark.gpu),
    ],
)
@pytest.mark.parametrize("longest", [64, 4])
def test_sequences_take_kernels_of_their_own(
    longest: int, device: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Images of 5 tokens; texts of 16 and of 8, which share their graphs; all short, or none."""
    pytest.importorskip("triton")
    from megabatch.models import block_attention, mlp, short_attention

    of_gelu = mock.patch.object(mlp, "_launch", side_effect=mlp._launch)
    kernels: Any = short_attention if longest == 64 else block_attention
    forward = "attention_forward" if longest == 64 else "attention_of_blocks"
    launch, launched = kernels._launch, []

    def count(kernel: Any, qkv: Tensor, *rest: Any, **tensors: Tensor) -> None:
        launched.append((kernel is not getattr(kernels, forward), qkv.shape[1]))
        launch(kernel, qkv, *rest, **tensors)

    monkeypatch.setattr(kernels, "_launch", count)
    monkeypatch.setattr("megabatch.models.fast_blocks.SHORT", longest)
    monkeypatch.setattr("megabatch.models.fast_blocks.kernels_available", lambda x: True)
    own = model(vision={"width": 64, "head_width": 32}, width=64).to(device)
    made = fast(own).float()
    compile_blocks(made, {"text"}, backend=backend)
    for columns in (CONTEXT, 8):
        launched.clear()
        values, gradients = [], []
        for module in (own, made):
            with torch.autocast(device, torch.float16), of_gelu as gelus:  # leaves float64 alone
                values.append(torch.cat(features(module, columns)))
                values[-1].mean().backward()
            assert gelus.call_count == (8 if module is made else 0)  # both passes of four blocks
            parameters = (p.grad for p in module.parameters() if p.grad is not None)
            gradients.append(torch.cat([gradient.flatten() for gradient in parameters]))
            module.zero_grad()
        for truth, found in (values, gradients):
            assert (found - truth).norm() < 0.01 * truth.norm()
        # In all blocks but the last one of each tower.
        backward = [(True, 5), (True, columns)] * (1 if longest == 64 else 2)
        assert sorted(launched) == sorted([(False, 5), (False, columns), *backward])


def test_layers_that_came_later_compute_their_products() -> None:
    pytest.importorskip("triton")

    class Doubled(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return 2 * super().forward(input)

    made = copy.deepcopy(model(width=64).half())
    use_fast_blocks(made, kernels=True)
    block = made.transformer.resblocks[0]
    block.mlp.c_proj.__class__ = Doubled
    x = torch.randn(2, 3, 64, dtype=torch.float16)
    assert torch.equal(block._mlp(x), block.mlp(x))
    block.mlp.c_proj.__class__ = nn.Linear
    used = mock.patch("megabatch.models.fast_blocks.mlp", side_effect=ArithmeticError)
    with used, pytest.raises(ArithmeticError):
        block._mlp(x)
