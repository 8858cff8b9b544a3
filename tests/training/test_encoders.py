"""A locked tower runs once a step, a live one twice, and gradients are the undivided batch's."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

from megabatch import ClipLoss
from megabatch.config.objective import create_objective
from megabatch.data import Batch
from megabatch.models import ModelOptions, create
from megabatch.models.blocks import compile_blocks
from megabatch.models.towers import Tower, lock, locked_towers, set_modes
from megabatch.training import TrainConfig
from megabatch.training.encoders import CachedStep
from tests.models.tiny import TINY

CPU = torch.device("cpu")


def tiny(*locked: Tower) -> nn.Module:
    torch.manual_seed(0)
    module = create(TINY).module
    for tower in locked:
        lock(module, tower)
    return set_modes(module)


def batch(size: int = 6) -> Batch:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(size, 3, 32, 32, generator=generator)
    texts = torch.randint(1, 49_000, (size, 16), generator=generator)
    return Batch(images, texts, torch.arange(size))


def count_calls(module: nn.Module) -> Counter[str]:
    """Forward passes of each tower."""
    calls: Counter[str] = Counter()
    whose: Any = module
    whose.visual.register_forward_pre_hook(lambda *_: calls.update(["image"]))
    whose.transformer.register_forward_pre_hook(lambda *_: calls.update(["text"]))
    return calls


@pytest.mark.parametrize(
    ("locked", "expected"),
    [
        ((), {"image": 6, "text": 6}),
        (("image",), {"image": 3, "text": 6}),
        (("text",), {"image": 6, "text": 3}),
    ],
)
def test_forward_passes_of_three_micro_batches(
    locked: tuple[Tower, ...], expected: dict[str, int]
) -> None:
    module = tiny(*locked)
    calls = count_calls(module)
    CachedStep(module, create_objective(TrainConfig()), 2, device=CPU)(batch()).backward()
    assert calls == expected


def captions(rows: int, context: int = 16, seed: int = 0) -> torch.Tensor:
    """Tokens (rows, context) of CLIP's kind: words, the end, padding."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, 49_000, (rows, context), generator=generator)
    ends = torch.randint(1, context, (rows, 1), generator=generator)
    tokens.scatter_(1, ends, 49_407)
    return tokens * (torch.arange(context) <= ends)


def sequence_shapes(blocks: nn.Module) -> list[tuple[int, ...]]:
    """Rows and tokens of each forward pass of a transformer."""
    shapes: list[tuple[int, ...]] = []
    blocks.register_forward_pre_hook(lambda _, args: shapes.append(tuple(args[0].shape[:2])))
    return shapes


@pytest.mark.parametrize("locked", [None, "image", "text"])
def test_texts_without_padding_give_the_same_loss_and_gradients(locked: Tower | None) -> None:
    towers = create(TINY)
    lengths = towers.lengths
    data = batch(22)
    data.texts = captions(22)
    losses, gradients, widths = [], [], []
    for trim in (False, True):
        module: Any = tiny(*([locked] if locked else [])).double()
        module.visual.patch_dropout = nn.Identity()
        shapes = sequence_shapes(module.transformer)
        objective = create_objective(TrainConfig(duplicates="ignored"))
        given = lengths if trim else None
        step = CachedStep(module, objective, 4, device=CPU, lengths=given)
        images = data.images.double()
        loss = step(Batch(images, data.texts, data.indices), torch.arange(22) // 2)
        loss.backward()
        losses.append(loss.detach())
        gradients.append([p.grad for p in module.parameters()])
        widths.append(shapes[:6])
    torch.testing.assert_close(losses[1], losses[0], rtol=0, atol=1e-12)
    for one, two in zip(*gradients, strict=True):
        assert (one is None) == (two is None)
        if one is not None:
            torch.testing.assert_close(two, one, rtol=0, atol=1e-12)
    assert widths[0] == [(4, 16)] * 5 + [(2, 16)]
    assert sum(rows for rows, _ in widths[1]) == 22
    assert max(rows * columns for rows, columns in widths[1]) == 48 < 4 * 16
    assert [columns for _, columns in widths[1]] == sorted(
        [columns for _, columns in widths[1]], reverse=True
    )
    assert {columns for _, columns in widths[1]} == {8, 16}


def test_texts_of_all_lengths_take_the_graphs_of_the_first_step() -> None:
    compiled = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(len(inputs))
        return graph.forward

    torch._dynamo.reset()
    towers, same = (create(TINY, options=ModelOptions(force_context_length=77)) for _ in range(2))
    same.module.load_state_dict(towers.module.state_dict())
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


@pytest.mark.parametrize("locked", ["image", "text"])
def test_gradients_are_those_of_the_undivided_batch(locked: Tower) -> None:
    module = tiny(locked)
    whose: Any = module
    whose.visual.patch_dropout = nn.Identity()  # drawn per micro-batch
    whole = copy.deepcopy(module)
    data = batch()
    expected = ClipLoss()(**whole(data.images, data.texts))
    expected.backward()
    loss = CachedStep(module, create_objective(TrainConfig()), 4, device=CPU)(data)
    loss.backward()
    torch.testing.assert_close(loss, expected)
    some = 0
    for (name, one), two in zip(module.named_parameters(), whole.parameters(), strict=True):
        assert (one.grad is None) == (two.grad is None), name
        if one.grad is not None and two.grad is not None:
            some += 1
            torch.testing.assert_close(one.grad, two.grad, atol=1e-6, rtol=1e-4, msg=name)
    assert some > 5


def test_the_loss_spends_nothing_on_locked_features(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {}

    class Loss(nn.Module):
        def forward(self, **outputs: torch.Tensor) -> torch.Tensor:
            seen.update({name: value.requires_grad for name, value in outputs.items()})
            return ClipLoss()(**outputs)

    CachedStep(tiny("image"), Loss(), 2, device=CPU)(batch()).backward()
    assert seen == {"image_features": False, "text_features": True, "logit_scale": True}


def test_a_locked_towers_features_have_nothing_random() -> None:
    step = CachedStep(tiny("image"), create_objective(TrainConfig()), 2, device=CPU)
    first = step.locked_features(batch().images)
    assert torch.equal(first, step.locked_features(batch().images))  # patch dropout is 0.5
    assert not first.requires_grad


def test_ids_reach_the_loss_with_a_locked_tower_too() -> None:
    ids = torch.tensor([1, 1, 2, 3, 4, 5])
    objective = create_objective(TrainConfig(duplicates="ignored"))
    losses = []
    for values in (ids, torch.arange(6)):
        step = CachedStep(tiny("text"), objective, 2, device=CPU)
        torch.manual_seed(0)
        losses.append(step(batch(), values))
    assert losses[0] < losses[1]  # fewer negatives


def test_half_precision_casts_of_locked_weights_pass_gradients_on() -> None:
    # Autocast keeps its casts: one made without a graph must not serve the pass with one.
    module = tiny("image")
    with torch.autocast("cpu", torch.bfloat16):
        CachedStep(module, create_objective(TrainConfig()), 2, device=CPU)(batch()).backward()
    live = [p for p in module.parameters() if p.requires_grad]
    assert live
    assert all(p.grad is not None and bool(p.grad.any()) for p in live)


def test_two_locked_towers_are_refused() -> None:
    module = tiny("image", "text")
    assert locked_towers(module) == {"image", "text"}
    with pytest.raises(ValueError, match="at most one tower"):
        CachedStep(module, create_objective(TrainConfig()), 2, device=CPU)
