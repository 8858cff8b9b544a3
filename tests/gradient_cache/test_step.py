"""The step against one graph of the whole batch, in float64."""

import copy

import pytest
import torch
from torch import nn

from megabatch.gradient_cache import GradientCache
from tests.gradient_cache.towers import (
    BATCH,
    MICRO_BATCH_SIZES,
    WIDTH,
    Tower,
    TwoTowers,
    assert_same,
    biased_loss,
    clip_loss,
    gradients,
    pairs,
)


@pytest.mark.parametrize("micro_batch_size", MICRO_BATCH_SIZES)
def test_two_encoders_and_a_parameter_of_the_loss(micro_batch_size):
    encoders, scale = (Tower(), Tower()), nn.ParameterList([torch.tensor(1.2)])
    x, y = pairs()

    def loss(x, y):
        return clip_loss(x, y, scale[0].exp())

    step = GradientCache(encoders, loss, micro_batch_size)
    value = step(x, y)
    assert value.shape == ()
    assert value.requires_grad
    assert_same(lambda: step(x, y), lambda: loss(encoders[0](x), encoders[1](y)), *encoders, scale)


@pytest.mark.parametrize("micro_batch_size", MICRO_BATCH_SIZES)
@pytest.mark.parametrize("scale_shape", [(), (1,)])
@pytest.mark.parametrize("form", [tuple, dict])
def test_one_model_that_returns_scale_and_bias(form, scale_shape, micro_batch_size):
    model, batches = TwoTowers(form, scale_shape=scale_shape), pairs()

    def plain():
        outputs = model(*batches)
        return biased_loss(**outputs) if form is dict else biased_loss(*outputs)

    step = GradientCache(model, biased_loss, micro_batch_size)
    assert_same(lambda: step(*batches), plain, model)
    assert model.logit_scale.grad.abs().item() > 1e-6


@pytest.mark.parametrize(("micro_batch_size", "calls"), [(5, 1), (64, 1), (3, 4)])
def test_a_batch_of_one_micro_batch_is_encoded_once(micro_batch_size, calls):
    seen = []
    model = TwoTowers()
    model.register_forward_pre_hook(lambda *_: seen.append(torch.is_grad_enabled()))
    GradientCache(model, biased_loss, micro_batch_size)(*pairs(5)).backward()
    assert len(seen) == calls
    assert seen[-1]


def test_a_batch_of_one_micro_batch_is_an_ordinary_step():
    """Bit for bit, with dropout and batch normalisation."""
    model = nn.Sequential(nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.Dropout(0.3))
    reference = copy.deepcopy(model)
    images, texts = pairs(6)
    torch.manual_seed(5)
    expected = clip_loss(reference(images), reference(texts))
    expected.backward()
    after = torch.get_rng_state()
    torch.manual_seed(5)
    value = GradientCache((model, model), clip_loss, 6)(images, texts)
    value.backward()
    assert torch.equal(value, expected)
    assert torch.equal(torch.get_rng_state(), after)
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)
    for mine, theirs in zip(model.buffers(), reference.buffers(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("kept", [0, 1, 2, 3, 100])
def test_one_encoder_for_both_batches_and_gradients_of_inputs(kept):
    tower, batches = Tower(), nn.ParameterList(pairs())
    step = GradientCache((tower, tower), clip_loss, 3, kept_micro_batches=kept)
    assert_same(lambda: step(*batches), lambda: clip_loss(*map(tower, batches)), tower, batches)


def test_three_encoders_and_loss_keywords():
    encoders, weight = [Tower() for _ in range(3)], torch.rand(BATCH)
    batches = [torch.randn(BATCH, WIDTH) for _ in encoders]

    def loss(x, y, z, *, weight):
        return (weight * (x * y).sum(1)).sum() + clip_loss(y, z)

    def plain():
        return loss(*(e(b) for e, b in zip(encoders, batches, strict=True)), weight=weight)

    step = GradientCache(encoders, loss, 2)
    assert_same(lambda: step(*batches, weight=weight), plain, *encoders)


def test_megabatchs_own_loss():
    from megabatch import ClipLoss

    class Model(TwoTowers):
        def forward(self, images, texts):
            return super().forward(images, texts)[:3]

    model, batches = Model(), pairs()
    step = GradientCache(model, ClipLoss(), 3)
    assert_same(lambda: step(*batches), lambda: clip_loss(*model(*batches)), model)


def test_inputs_of_a_frozen_encoder_get_their_gradients():
    tower, frozen, batches = Tower(), Tower().requires_grad_(False), nn.ParameterList(pairs())
    step = GradientCache((tower, frozen), clip_loss, 3)
    assert_same(
        lambda: step(*batches), lambda: clip_loss(tower(batches[0]), frozen(batches[1])), batches
    )


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"micro_batch_size": 0}, ValueError, "micro_batch_size.*got 0"),
        ({"micro_batch_size": -3}, ValueError, "micro_batch_size.*got -3"),
        ({"micro_batch_size": 2.0}, TypeError, "micro_batch_size.*float"),
        ({"micro_batch_size": True}, TypeError, "micro_batch_size.*bool"),
        ({"encoders": ()}, ValueError, "encoders.*none"),
        ({"encoders": (abs, 3)}, TypeError, "encoders.*int"),
        ({"encoders": "model"}, TypeError, "encoders.*str"),
        ({"loss": None}, TypeError, "loss.*NoneType"),
        (
            {"scaler": torch.amp.GradScaler("cpu")},
            TypeError,
            "unexpected keyword argument 'scaler'",
        ),
        ({"group": "world"}, TypeError, "group.*world"),
    ],
)
def test_bad_arguments(change, error, message):
    arguments = {"encoders": (abs, abs), "loss": clip_loss, "micro_batch_size": 2} | change
    with pytest.raises(error, match=message):
        GradientCache(**arguments)


@pytest.mark.parametrize(
    ("loss", "error", "message"),
    [
        (lambda x, y: x @ y.T, ValueError, r"loss.*\(7, 7\)"),
        (lambda x, y: 1.0, TypeError, "loss.*float"),
        (lambda x, y: {"loss": x.sum()}, TypeError, "loss.*dict"),
        (lambda x, y: x.detach().sum(), ValueError, "loss.*requires a gradient"),
    ],
)
def test_bad_losses(loss, error, message):
    towers = (Tower(), Tower())
    with pytest.raises(error, match=message):
        GradientCache(towers, loss, 3)(*pairs()).backward()
    assert all(gradient is None for gradient in gradients(*towers))
