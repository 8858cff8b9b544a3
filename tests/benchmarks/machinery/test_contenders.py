from __future__ import annotations

import pytest
import torch

from machinery import step
from machinery.contenders import CLIP
from machinery.inputs import Case


@pytest.mark.parametrize("name", [c.name for c in CLIP.contenders.values() if c.runs_on("cpu")])
def test_every_contender_is_the_loss(name: str) -> None:
    made = Case("clip", name, "cpu", "float64", b=20, d=8, scale=30.0)
    inputs = step.make_inputs(made)
    call = step.forward_backward(CLIP.contenders[name].load(), made, inputs)
    value, exact = call(), step.exact_result(made, inputs)
    found = [value, inputs.x.grad, inputs.y.grad, *(scalar.grad for scalar in inputs.scalars)]
    for mine, theirs in zip(found, [t for t in exact if t is not None], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-11)
