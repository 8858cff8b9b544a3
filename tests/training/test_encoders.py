"""A locked tower runs once a step, a live one twice, and gradients are the undivided batch's."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megabatch.config.objective import create_objective
from megabatch.data import Batch
from megabatch.models import ModelOptions, create
from megabatch.models.blocks import compile_blocks
from megabatch.models.towers import Tower, lock, set_modes
from megabatch.training import TrainConfig
from megabatch.training.encoders import CachedStep
from tests.models.tiny import TINY

CPU = torch.device("cpu")
IDS = torch.arange(22) // 2
NEGATIVES = {"loss": "infonce", "hard_negatives": 2}


def tiny(*locked: Tower, **options: Any) -> Any:
    torch.manual_seed(0)
    towers = create(TINY, options=ModelOptions(**options))
    for tower in locked:
        lock(towers.module, tower)
    set_modes(towers.module)
    return towers


def captions(rows: int, context: int = 16, seed: int = 0) -> Tensor:
    """Tokens (rows, context) of CLIP's kind: words, the end, padding."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, 49_000, (rows, context), generator=generator)
    ends = torch.randint(1, context, (rows, 1), generator=generator)
    tokens.scatter_(1, ends, 49_407)
    return tokens * (torch.arange(context) <= ends)


def batch(size: int = 6, negatives: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(size, 3, 32, 32, generator=generator)
    texts = torch.stack([captions(size, seed=seed) for seed in range(1 + negatives)], 2)
    return Batch(images, texts if negatives else texts[..., 0], torch.arange(size))


def count_calls(module: Any) -> Counter[str]:
    """Forward passes of each tower."""
    calls: Counter[str] = Counter()
    module.visual.register_forward_pre_hook(lambda *_: calls.update(["image"]))
    module.transformer.register_forward_pre_hook(lambda *_: calls.update(["text"]))
    return calls


def sequence_shapes(blocks: nn.Module) -> list[tuple[int, ...]]:
    """Rows and tokens of each forward pass of a transformer."""
    shapes: list[tuple[int, ...]] = []
    blocks.register_forward_pre_hook(lambda _, args: shapes.append(tuple(args[0].shape[:2])))
    return shapes


def gradients_of(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


def dense_loss(module: Any, data: Batch) -> Tensor:
    """The undivided batch's loss over a dense matrix; texts (b, context, 1 + k) have negatives."""
    x = module.encode_image(data.images, normalize=True)
    texts = data.texts if data.texts.ndim == 3 else data.texts[..., None]
    y = torch.cat([module.encode_text(t, normalize=True) for t in texts.unbind(2)])
    logits = module.logit_scale.exp() * x @ y.T
    own = torch.arange(len(x))
    if len(y) > len(x):
        return F.cross_entropy(logits, own)
    twins = (IDS[:, None] == IDS) & ~torch.eye(len(x), dtype=torch.bool)
    logits = logits.masked_fill(twins, -torch.inf)
    return (F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2


@pytest.mark.parametrize("trimmed", [False, True])
@pytest.mark.parametrize(
    ("locked", "negatives"), [((), 0), (("image",), 0), (("text",), 0), ((), 2), (("image",), 2)]
)
def test_loss_and_gradients_are_those_of_a_dense_matrix(
    locked: tuple[Tower, ...], negatives: int, trimmed: bool
) -> None:
    towers = tiny(*locked, force_patch_dropout=0.5 if "image" in locked else 0.0)
    module, data = towers.module.double(), batch(22, negatives)
    data.images = data.images.double()
    expected = dense_loss(module, data)
    expected.backward()
    gradients = gradients_of(module)
    assert len(gradients) > 5

    module.zero_grad()
    calls, shapes = count_calls(module), sequence_shapes(module.transformer)
    config = TrainConfig(**NEGATIVES) if negatives else TrainConfig(duplicates="ignored")
    objective, seen = create_objective(config, group="local"), {}

    def look(_: nn.Module, __: Any, given: dict[str, Any]) -> None:
        seen.update({name: t.requires_grad for name, t in given.items() if t is not None})

    objective.register_forward_pre_hook(look, with_kwargs=True)
    lengths = towers.lengths if trimmed else None
    step = CachedStep(module, objective, 4, device=CPU, group="local", lengths=lengths)
    loss = step(data, None if negatives else IDS)
    loss.backward()
    torch.testing.assert_close(loss.detach(), expected.detach(), rtol=0, atol=1e-12)
    assert gradients_of(module).keys() == gradients.keys()
    for name, gradient in gradients_of(module).items():
        torch.testing.assert_close(gradient, gradients[name], rtol=0, atol=1e-11, msg=name)

    assert calls == {tower: 6 if tower in locked else 12 for tower in ("image", "text")}
    for tower in ("image", "text"):  # the loss computes no gradient of constants
        assert seen[f"{tower}_features"] == (tower not in locked)
    first = shapes[:6]
    assert sum(rows for rows, _ in first) == 22 * (1 + negatives)
    if not trimmed:
        assert first == [(4 * (1 + negatives), 16)] * 5 + [(2 * (1 + negatives), 16)]
    elif not negatives:
        assert max(rows * columns for rows, columns in first) == 48 < 4 * 16
        columns = [columns for _, columns in first]
        assert (columns, {*columns}) == (sorted(columns, reverse=True), {8, 16})


@pytest.mark.parametrize("locked", [(), ("text",)])
def test_micro_batches_by_tokens_are_those_of_the_texts_or_of_the_images(
    locked: tuple[Tower, ...],
) -> None:
    towers = tiny(*locked, force_patch_dropout=0.0)
    module, data = towers.module.double(), batch(22)
    data.images = data.images.double()
    shapes, images = sequence_shapes(module.transformer), []
    module.visual.register_forward_pre_hook(lambda _, args: images.append(len(args[0])))
    dense_loss(module, data).backward()
    gradients = gradients_of(module)
    module.zero_grad()
    for size, tokens, count in ((4, 1000, 6), (22, 32, 8)):
        objective = create_objective(TrainConfig(duplicates="ignored"), group="local")
        options: Any = {"device": CPU, "group": "local", "lengths": towers.lengths}
        step = CachedStep(module, objective, size, micro_batch_tokens=tokens, **options)
        images.clear()
        shapes.clear()
        step(data, IDS).backward()
        found = gradients_of(module)
        torch.testing.assert_close(found, gradients, rtol=0, atol=1e-11)
        module.zero_grad()
        assert max(rows * columns for rows, columns in shapes) <= tokens
        if locked:  # which has micro-batches of its own
            assert len(images) == {4: 12, 22: 1}[size]
        else:
            assert len(images) == len(shapes) == 2 * count


def test_texts_of_all_lengths_take_the_graphs_of_the_first_step() -> None:
    compiled = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(len(inputs))
        return graph.forward

    torch._dynamo.reset()
    towers, same = (tiny(force_context_length=77) for _ in range(2))
    compile_blocks(towers.module, towers.lengths, backend=backend)
    widths = sequence_shapes(towers.module.transformer)
    steps = [
        CachedStep(
            each.module.double().eval(),
            create_objective(TrainConfig()),
            6,
            device=CPU,
            lengths=each.lengths,
        )
        for each in (towers, same)
    ]
    data, counts = batch(16), []
    data.images = data.images.double()
    for longest in (40, 77, 8, 24):  # the last micro-batch has four rows
        data.texts = captions(16, 77, longest).clamp(max=49_406)
        data.texts[:, longest:] = 0
        data.texts[::2, 7] = 49_407
        data.texts[1::2, min(longest, 77) - 1] = 49_407
        for step in steps:
            step.module.zero_grad()
            step(data).backward()
        for one, two in zip(towers.module.parameters(), same.module.parameters(), strict=True):
            torch.testing.assert_close(one.grad, two.grad, rtol=0, atol=1e-12)
        counts.append(len(compiled))
    torch._dynamo.reset()
    assert {columns for _, columns in widths} == {8, 24, 40, 77}
    # With and without gradients: the text tower's; for two numbers of rows the image tower's blocks
    # and its convolution.
    assert counts == [10] * len(counts)


def test_half_precision_casts_of_locked_weights_pass_gradients_on() -> None:
    # Autocast keeps its casts: one made without a graph must not serve the pass with one.
    module = tiny("image").module
    with torch.autocast("cpu", torch.bfloat16):
        CachedStep(module, create_objective(TrainConfig()), 2, device=CPU)(batch()).backward()
    live = [p for p in module.parameters() if p.requires_grad]
    assert live
    assert all(p.grad is not None and bool(p.grad.any()) for p in live)
