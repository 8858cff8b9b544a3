"""benchmarks/gradients.py: its truth, our losses and a wrong one on two processes."""

from __future__ import annotations

import pytest
import torch

import gradients as program
import megabatch as mb
from tests.similarity.distributed.processes import World, on_processes


@pytest.mark.parametrize(
    ("exact", "ours"),
    [
        (program.clip, mb.ClipLoss()),
        (program.infonce, lambda x, y, scale: mb.InfoNCELoss(1.0)(x, y, temperature=1 / scale)),
        (program.siglip, lambda x, y, scale: mb.SigLipLoss()(x, y, scale, program.BIAS)),
        (program.nt_xent, lambda x, y, scale: mb.NTXentLoss(1.0)(x, y, temperature=1 / scale)),
    ],
)
def test_the_losses_of_the_whole_batch_are_ours(exact, ours):
    model, sides = program.problem(exact, learnt=True)
    features = model(*sides).values()
    torch.testing.assert_close(exact(*features), ours(*features), rtol=1e-12, atol=0.0)


def test_the_factor_is_the_projections():
    right, across = torch.tensor([3.0, 4.0]), torch.tensor([-4.0, 3.0])
    assert program.factor(0.5 * right + 7 * across, right) == pytest.approx(0.5)


@on_processes(2)
def test_ours_are_right_and_rows_without_the_others_gradients_are_not(world: World) -> None:
    for step in (program.after(mb.ClipLoss()), program.gradient_cache):
        ours = program.measure("ours", "definition", program.clip, step)
        assert ours["status"] == "ok", ours
        assert ours["encoder_factor"] == pytest.approx(1, abs=1e-12)
        assert ours["scale_factor"] == pytest.approx(1, abs=1e-12)
    step = program.after(program.flag_embedding)
    half = program.measure("half", "definition", program.infonce, step)
    assert half["status"] == "wrong"
    assert half["encoder_factor"] == pytest.approx(0.5)
    assert half["cosine"] == pytest.approx(1)


@on_processes(2)
def test_a_missing_or_failing_library_is_recorded(world: World) -> None:
    missing = program.measure("a", "no-such-package", program.clip, program.gradient_cache)
    assert missing["status"] == "not installed"
    failing = program.measure("b", "definition", program.clip, program.after(lambda *_: 1 / 0))
    assert (failing["status"], failing["note"][:17]) == ("failed", "ZeroDivisionError")
