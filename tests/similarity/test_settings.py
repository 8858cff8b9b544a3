"""The backward pass runs with the settings of its forward pass, whatever changes in between."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from megabatch import similarity
from megabatch.similarity import backends, eager, settings, tiles
from tests.process_state import changed
from tests.similarity.changes import CHANGES, EAGER_ONLY, LOSSES, gradients, leaves

DTYPES = (torch.float64, torch.float32, torch.bfloat16)


def close(ours: list[torch.Tensor], truth: list[torch.Tensor]) -> None:
    """Assert equality up to the order in which threads and blocks add."""
    for a, b in zip(ours, truth, strict=True):
        relative = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2}[b.dtype]
        assert (a - b).abs().max() <= relative * b.abs().max()


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("change", CHANGES)
def test_a_setting_changed_before_the_backward_pass(change: str, loss: str) -> None:
    for dtype in DTYPES:
        truth = gradients(LOSSES[loss], leaves(dtype, 150), nullcontext())
        close(gradients(LOSSES[loss], leaves(dtype, 150), CHANGES[change]()), truth)


@pytest.mark.parametrize("loss", LOSSES)
def test_a_compiled_function_follows_settings(loss: str) -> None:
    """Each call uses the workspace that was set when it began, and so does its backward pass."""
    truth = gradients(LOSSES[loss], leaves(torch.float64), nullcontext())
    compiled = torch.compile(LOSSES[loss], backend="aot_eager", fullgraph=True)
    for change in CHANGES.keys() - EAGER_ONLY:
        close(gradients(compiled, leaves(torch.float64), CHANGES[change]()), truth)
    with CHANGES["workspace, smaller"]():
        close(gradients(compiled, leaves(torch.float64), CHANGES["workspace, larger"]()), truth)


class OnGpu(torch.Tensor):
    """A tensor that claims to be on a GPU."""

    is_cuda, device = True, torch.device("cuda", 0)  # type: ignore[assignment]


def test_one_warning_of_float32_features_that_the_kernels_do_not_take(
    monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    monkeypatch.setattr(backends, "_warned", False)
    features = torch.zeros(1, 1).as_subclass(OnGpu)
    monkeypatch.setattr(backends, "_kernels_on", lambda device: False)
    backends.warn_of_float32(features)  # a GPU without kernels
    monkeypatch.setattr(backends, "_kernels_on", lambda device: True)
    for dtype in (torch.bfloat16, torch.float64):
        backends.warn_of_float32(features.to(dtype))
    with CHANGES["precision"]():
        backends.warn_of_float32(features)
    backends.warn_of_float32(torch.zeros(1, 1))  # on the CPU
    assert not recwarn
    for _ in range(2):
        backends.warn_of_float32(features)
    (warning,) = recwarn
    assert "float32 features on a GPU" in str(warning.message)


def test_every_function_warns_of_float32_features(monkeypatch: pytest.MonkeyPatch) -> None:
    warned: list[torch.Tensor] = []
    monkeypatch.setattr(backends, "warn_of_float32", warned.append)
    calls = [*LOSSES.values(), lambda x, y, scale: similarity.logsumexp(x, y, scale)]
    for number, call in enumerate(calls, 1):
        call(*leaves(torch.float32, 4))
        assert len(warned) == number


@pytest.mark.parametrize(("first", "then"), [("highest", "medium"), ("medium", "highest")])
def test_products_are_as_precise_as_in_the_forward_pass(
    first: str, then: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = set()
    for module, name in ((eager, "logits"), (tiles, "add_product")):
        original = getattr(module, name)

        def recording(*a: Any, original: Any = original, **k: Any) -> Any:
            seen.add(settings.PRECISIONS[settings.precision("cpu")])
            return original(*a, **k)

        monkeypatch.setattr(module, name, recording)
    with changed("precision", first):
        value = LOSSES["softmax"](*(mine := leaves(torch.float32)))
    with changed("precision", then):
        torch.autograd.grad(value, mine)
        assert torch.get_float32_matmul_precision() == then
    assert seen == {{"highest": "ieee", "medium": "bf16"}[first]}


@pytest.mark.parametrize("loss", LOSSES)
def test_deterministic_algorithms(loss: str) -> None:
    """torch then fills new memory with NaN, which must not reach a result."""
    truth = gradients(LOSSES[loss], leaves(torch.float32), nullcontext())
    with CHANGES["deterministic"]():
        close(gradients(LOSSES[loss], leaves(torch.float32), nullcontext()), truth)


@pytest.mark.parametrize("loss", LOSSES)
def test_an_input_changed_in_place_before_the_backward_pass(loss: str) -> None:
    for number in range(3):
        mine = leaves(torch.float64)
        value = LOSSES[loss](*mine)
        with torch.no_grad():
            mine[number].mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            value.backward()


@pytest.mark.parametrize("loss", LOSSES)
def test_twice_backward_through_one_forward(loss: str) -> None:
    mine = leaves(torch.float64)
    value = LOSSES[loss](*mine)
    first = torch.autograd.grad(value, mine, retain_graph=True)
    with CHANGES["workspace, smaller"]():
        second = torch.autograd.grad(value, mine)
    close(list(second), list(first))


@pytest.mark.parametrize("loss", LOSSES)
def test_without_gradients(loss: str) -> None:
    """Inference mode, no_grad and detached inputs all give the same value."""
    mine = leaves(torch.float64)
    truth = LOSSES[loss](*mine).detach()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert torch.equal(LOSSES[loss](*mine), truth)
    assert torch.equal(LOSSES[loss](*(leaf.detach() for leaf in mine)), truth)
