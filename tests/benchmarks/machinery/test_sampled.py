from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from machinery.sampled import Sampled


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = nn.Linear(3, 2), nn.Linear(3, 2)
        self.calls: list[str] = []

    def encode_image(self, inputs: Tensor) -> Tensor:
        self.calls.append("image")
        made: Tensor = self.image(inputs)
        return made

    def encode_text(self, inputs: Tensor) -> Tensor:
        self.calls.append("text")
        made: Tensor = self.text(inputs)
        return made


def test_towers_run_on_some_micro_batches_of_each_pass() -> None:
    module, x = Towers(), torch.randn(4, 3)
    expected = module.image(x)
    skipped: list[int] = []
    begun: list[int] = []
    ran = []
    with Sampled(module, 7, 3, lambda: skipped.append(1), lambda: begun.append(1)):
        for _ in range(2):  # passes
            for position in range(7):
                before = len(module.calls)
                torch.testing.assert_close(module.encode_image(x), expected)
                module.encode_text(x)
                ran.append((position, len(module.calls) - before))
    assert [position for position, calls in ran if calls == 2] == [0, 3, 6] * 2
    assert (len(skipped), len(begun)) == (2 * 2 * 4, 2 * 2 * 3)
    module.calls.clear()
    module.encode_image(x)
    assert module.calls == ["image"]


def test_others_give_a_gradient_of_zero_with_ddp_to_every_parameter() -> None:
    module, x = Towers(), torch.randn(4, 3)
    for ddp, number in ((True, 4), (False, 1)):
        with Sampled(module, total=3, real=2, ddp=ddp):
            module.encode_image(x).sum().backward()
            module.zero_grad()
            module.encode_image(x[:2]).sum().backward()  # skipped
        gradients = [p.grad for p in module.parameters() if p.grad is not None]
        assert len(gradients) == number
        assert not any(gradient.any() for gradient in gradients)


def test_others_may_have_more_rows() -> None:
    module, x = Towers(), torch.randn(7, 3)
    with Sampled(module, total=4, real=2):
        for rows in (2, 1, 3, 7):  # the first and the last one are encoded
            assert len(module.encode_text(x[:rows])) == rows
    assert module.calls == ["text"] * 2


def test_another_wrapper_is_as_it_was() -> None:
    module = Towers()
    module.encode_image = lambda inputs: inputs + 1  # type: ignore[method-assign]
    with Sampled(module, total=2, real=2):
        assert module.encode_image(torch.zeros(1)) == 1
    assert module.encode_image(torch.zeros(1)) == 1


@pytest.mark.parametrize("real", [1, 8])
def test_numbers_that_cannot_be(real: int) -> None:
    with pytest.raises(ValueError, match=f"real: expected 2 to 7 micro-batches, got {real}"):
        Sampled(Towers(), total=7, real=real)
