"""Gradient caching against one graph of the whole batch, in float64 where not said otherwise."""

import copy
import weakref
from collections import UserDict, namedtuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from megabatch.gradient_cache import GradientCache

BATCH, WIDTH, DIMS = 7, 5, 4
MICRO_BATCH_SIZES = (1, 2, 3, 4, 7, 100)  # 2, 3, 4 leave a smaller last micro-batch


@pytest.fixture(autouse=True)
def _double_precision():
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def clip_loss(image_features, text_features, logit_scale=3.0):
    logits = logit_scale * image_features @ text_features.T
    labels = torch.arange(len(logits), device=logits.device)
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2


class Tower(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(WIDTH, 8), nn.GELU(), nn.Dropout(dropout), nn.Linear(8, DIMS)
        )
        self.graph_recorded = []  # one entry a forward pass

    def forward(self, x):
        self.graph_recorded.append(torch.is_grad_enabled())
        return F.normalize(self.layers(x), dim=-1)


class TwoTowers(nn.Module):
    """Returns features, scale and bias in the given form, as open_clip's models do."""

    def __init__(self, form=tuple, dropout=0.0, scale_shape=()):
        super().__init__()
        self.image, self.text = Tower(dropout), Tower(dropout)
        self.logit_scale = nn.Parameter(torch.full(scale_shape, 1.2))
        self.logit_bias = nn.Parameter(torch.full(scale_shape, -0.3))
        self.form = form

    def forward(self, images, texts):
        outputs = {
            "image_features": self.image(images),
            "text_features": self.text(texts),
            "logit_scale": self.logit_scale.exp(),
            "logit_bias": self.logit_bias,  # the parameter itself
        }
        return outputs if self.form is dict else tuple(outputs.values())


def biased_loss(image_features, text_features, logit_scale, logit_bias):
    logits = logit_scale * image_features @ text_features.T + logit_bias
    return F.softplus(-logits * (2 * torch.eye(len(logits)) - 1)).sum() / len(logits)


def pairs(batch=BATCH):
    return torch.randn(batch, WIDTH), torch.randn(batch, WIDTH)


def gradients(*modules):
    return [p.grad for module in modules for p in module.parameters()]


def assert_same_gradients(actual, expected, tolerance=1e-9):
    assert len(actual) == len(expected) > 0
    for a, e in zip(actual, expected, strict=True):
        if e is None:
            assert a is None
        else:
            torch.testing.assert_close(a, e, rtol=tolerance, atol=tolerance)


# --- equal to the whole batch ---------------------------------------------------------------------


@pytest.mark.parametrize("micro_batch_size", MICRO_BATCH_SIZES)
def test_two_encoders_and_a_parameter_of_the_loss(micro_batch_size):
    encoders = nn.ModuleList([Tower(), Tower()])
    scale = nn.Parameter(torch.tensor(1.2))
    images, texts = pairs()

    def loss(x, y):
        return clip_loss(x, y, scale.exp())

    expected = loss(encoders[0](images), encoders[1](texts))
    expected.backward()
    wanted = [*gradients(encoders), scale.grad]
    encoders.zero_grad()
    scale.grad = None

    value = GradientCache(tuple(encoders), loss, micro_batch_size)(images, texts)
    assert value.shape == ()
    assert not value.requires_grad
    torch.testing.assert_close(value, expected.detach(), rtol=1e-12, atol=0)
    assert_same_gradients([*gradients(encoders), scale.grad], wanted)


@pytest.mark.parametrize("micro_batch_size", MICRO_BATCH_SIZES)
@pytest.mark.parametrize("scale_shape", [(), (1,)])
@pytest.mark.parametrize("form", [tuple, dict])
def test_one_model_that_returns_scale_and_bias(form, scale_shape, micro_batch_size):
    model = TwoTowers(form, scale_shape=scale_shape)
    batches = pairs()
    reference = copy.deepcopy(model)
    reference.form = tuple
    biased_loss(*reference(*batches)).backward()

    step = GradientCache(model, biased_loss, micro_batch_size)
    step(*batches)
    assert_same_gradients(gradients(model), gradients(reference))
    assert model.logit_scale.grad.abs().item() > 1e-6


def test_a_second_step_adds_to_the_gradients():
    model, reference = (TwoTowers() for _ in range(2))
    reference.load_state_dict(model.state_dict())
    step = GradientCache(model, biased_loss, 3)
    for batches in (pairs(7), pairs(4)):
        biased_loss(*reference(*batches)).backward()
        step(*batches)
    assert_same_gradients(gradients(model), gradients(reference))


def test_one_encoder_for_both_batches():
    tower = Tower()
    images, texts = pairs()
    clip_loss(tower(images), tower(texts)).backward()
    expected = gradients(tower)
    tower.zero_grad()
    GradientCache((tower, tower), clip_loss, 3)(images, texts)
    assert_same_gradients(gradients(tower), expected)


def test_three_encoders_and_loss_keywords():
    encoders = nn.ModuleList([Tower() for _ in range(3)])
    batches = [torch.randn(BATCH, WIDTH) for _ in encoders]
    weight = torch.rand(BATCH)

    def loss(x, y, z, *, weight):
        return (weight * (x * y).sum(1)).sum() + clip_loss(y, z)

    loss(*(e(b) for e, b in zip(encoders, batches, strict=True)), weight=weight).backward()
    expected = gradients(encoders)
    encoders.zero_grad()
    GradientCache(list(encoders), loss, 2)(*batches, weight=weight)
    assert_same_gradients(gradients(encoders), expected)


def test_the_exact_tiled_loss():
    from megabatch import ClipLoss

    class Model(TwoTowers):
        def forward(self, images, texts):
            return super().forward(images, texts)[:3]

    model = Model()
    batches = pairs()
    expected = clip_loss(*model(*batches))
    expected.backward()
    wanted = gradients(model)
    model.zero_grad()
    value = GradientCache(model, ClipLoss(), 3)(*batches)
    torch.testing.assert_close(value, expected.detach(), rtol=1e-11, atol=1e-11)
    assert_same_gradients(gradients(model), wanted)


def test_inputs_that_require_gradients_get_them():
    tower, frozen = Tower(), Tower().requires_grad_(False)
    images, texts = (x.requires_grad_() for x in pairs())
    clip_loss(tower(images), frozen(texts)).backward()
    expected = [images.grad, texts.grad]
    images.grad = texts.grad = None
    GradientCache((tower, frozen), clip_loss, 3)(images, texts)
    assert_same_gradients([images.grad, texts.grad], expected)


def test_called_where_gradients_are_off():
    encoders = (Tower(), Tower())
    batches = pairs()
    with torch.no_grad():
        GradientCache(encoders, clip_loss, 3)(*batches)
    actual = gradients(*encoders)
    for encoder in encoders:
        encoder.zero_grad()
    clip_loss(encoders[0](batches[0]), encoders[1](batches[1])).backward()
    assert_same_gradients(actual, gradients(*encoders))


# --- randomness, precision, scaling ---------------------------------------------------------------


def one_graph(encoders, batches, loss, micro_batch_size):
    """The step's definition under dropout: all micro-batches in one graph, then the loss."""
    features = [
        torch.cat([encoder(part) for part in batch.split(micro_batch_size)])
        for encoder, batch in zip(encoders, batches, strict=True)
    ]
    value = loss(*features)
    after = torch.get_rng_state()
    value.backward()
    return value.detach(), after


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("micro_batch_size", MICRO_BATCH_SIZES)
def test_dropout_is_replayed(micro_batch_size, checkpointed):
    towers = nn.ModuleList([Tower(dropout=0.5), Tower(dropout=0.5)])
    batches = pairs()

    def encoder(tower):
        return (lambda x: checkpoint(tower, x, use_reentrant=False)) if checkpointed else tower

    def loss(x, y):  # draws random numbers as well
        return clip_loss(x * torch.rand_like(x), y)

    torch.manual_seed(1)
    expected, after = one_graph(towers, batches, loss, micro_batch_size)
    wanted = gradients(towers)
    towers.zero_grad()

    torch.manual_seed(1)
    value = GradientCache([encoder(t) for t in towers], loss, micro_batch_size)(*batches)
    assert torch.equal(torch.get_rng_state(), after)
    torch.testing.assert_close(value, expected, rtol=1e-12, atol=0)
    assert_same_gradients(gradients(towers), wanted)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_dropout_is_replayed_on_cuda():
    towers = nn.ModuleList([Tower(dropout=0.5), Tower(dropout=0.5)]).cuda()
    batches = [batch.cuda() for batch in pairs()]
    torch.manual_seed(1)
    one_graph(towers, batches, clip_loss, 3)
    wanted, after = gradients(towers), torch.cuda.get_rng_state()
    towers.zero_grad()
    torch.manual_seed(1)
    on_host = [batch.cpu() for batch in batches]  # the encoders move one micro-batch at a time
    encoders = tuple((lambda x, tower=tower: tower(x.cuda())) for tower in towers)
    GradientCache(encoders, clip_loss, 3)(*on_host)
    assert torch.equal(torch.cuda.get_rng_state(), after)
    assert_same_gradients(gradients(towers), wanted)


def test_autocast_covers_both_passes_and_the_loss():
    towers = nn.ModuleList([Tower(), Tower()]).float()
    batches = [batch.float() for batch in pairs()]
    seen = []

    def loss(x, y):
        seen.extend([x.dtype, y.dtype, (x @ y.T).dtype])
        return clip_loss(x, y)

    for tower in towers:
        tower.forward = tower.layers  # normalisation would return fp32
    clip_loss(*(t(b) for t, b in zip(towers, batches, strict=True))).backward()
    exact = gradients(towers)
    towers.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        GradientCache(tuple(towers), loss, 3)(*batches)
    assert seen == [torch.bfloat16] * 3
    for actual, wanted in zip(gradients(towers), exact, strict=True):
        assert actual.dtype == torch.float32
        assert (actual - wanted).norm() < 0.03 * wanted.norm()
        assert not torch.equal(actual, wanted)  # so that the pass was in bfloat16


def test_scaler_scales_every_gradient_but_not_the_loss():
    model, reference = (TwoTowers() for _ in range(2))
    reference.load_state_dict(model.state_dict())
    bias = nn.Parameter(torch.tensor(0.1))

    def loss(x, y, scale, shift):
        return biased_loss(x, y, scale, shift + bias)

    batches = pairs()
    expected = loss(*reference(*batches))
    expected.backward()
    wanted = [*gradients(reference), bias.grad]
    bias.grad = None
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    value = GradientCache(model, loss, 3, scaler=scaler)(*batches)
    torch.testing.assert_close(value, expected.detach(), rtol=1e-12, atol=0)
    assert_same_gradients([*gradients(model), bias.grad], [1024 * gradient for gradient in wanted])


# --- what runs, and how often ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "callable_of", [lambda t: t, lambda t: t.forward, lambda t: lambda x: t(x)]
)
def test_a_frozen_tower_runs_once(callable_of):
    frozen, tower = Tower().requires_grad_(False), Tower()
    batches = pairs()
    GradientCache((callable_of(frozen), callable_of(tower)), clip_loss, 3)(*batches)
    assert (len(frozen.graph_recorded), len(tower.graph_recorded)) == (3, 6)
    actual = gradients(tower)
    tower.zero_grad()
    clip_loss(frozen(batches[0]), tower(batches[1])).backward()
    assert_same_gradients(actual, gradients(tower))


def test_the_first_pass_records_no_graph_where_a_second_is_sure_to_come():
    module, function = Tower(), Tower()
    GradientCache((module, lambda x: function(x)), clip_loss, 3)(*pairs())
    assert module.graph_recorded == [False] * 3 + [True] * 3
    assert function.graph_recorded == [True, False, False] + [True] * 3  # until it is sure


def test_a_partly_frozen_tower_and_parameters_that_a_module_does_not_list():
    towers = nn.ModuleList([Tower(), Tower()])
    towers[0].layers[0].requires_grad_(False)

    class Hidden(nn.Module):
        def __init__(self, tower):
            super().__init__()
            self.encode = tower.forward  # a method: its parameters are not this module's

        def forward(self, x):
            return self.encode(x)

    batches = pairs()
    clip_loss(*(t(b) for t, b in zip(towers, batches, strict=True))).backward()
    expected = gradients(towers)
    towers.zero_grad()
    GradientCache((towers[0], Hidden(towers[1])), clip_loss, 3)(*batches)
    assert_same_gradients(gradients(towers), expected)


def live_rows(batches, run):
    """Most rows of hidden activations that graphs held at one time while `run` ran."""
    live = peak = 0

    class Saved:
        def __init__(self, tensor):
            self.tensor = tensor.detach()  # an output held with its graph would be a cycle

    def free(rows):
        nonlocal live
        live -= rows

    def pack(tensor):
        nonlocal live, peak
        saved = Saved(tensor)
        if tensor.ndim == 2 and tensor.shape[1] == 8 and not isinstance(tensor, nn.Parameter):
            live += len(tensor)
            peak = max(peak, live)
            weakref.finalize(saved, free, len(tensor))
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved.tensor):
        run(*batches)
    return peak


@pytest.mark.parametrize("wrap", [lambda t: t, lambda t: lambda x: t(x)], ids=["module", "lambda"])
def test_only_one_micro_batch_keeps_activations(wrap):
    tower = Tower()
    small, large = pairs(2), pairs(40)
    one = live_rows(small[:1], lambda x: tower(x).sum().backward())
    assert one >= 4  # two saved activations of two rows
    step = GradientCache((wrap(tower), wrap(tower)), clip_loss, 2)
    assert live_rows(large, step) == one
    whole = live_rows(large, lambda x, y: clip_loss(tower(x), tower(y)).backward())
    assert whole == 40 * one  # two towers, 20 times the rows


@pytest.mark.parametrize("norm", [nn.BatchNorm1d, nn.InstanceNorm1d])
def test_running_statistics_see_each_micro_batch_once(norm):
    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = norm(WIDTH, track_running_stats=True, affine=True)
            self.out = nn.Linear(WIDTH, DIMS)

        def forward(self, x):
            return self.out(self.norm(x.unsqueeze(2).expand(-1, -1, 3).cumsum(2)).mean(2))

    encoders = nn.ModuleList([Encoder(), Encoder()])
    reference = copy.deepcopy(encoders)
    batches = pairs(8)
    one_graph(reference, batches, clip_loss, 4)
    GradientCache(tuple(encoders), clip_loss, 4)(*batches)
    assert encoders[0].norm.running_mean.abs().sum() > 0
    for actual, expected in zip(encoders.buffers(), reference.buffers(), strict=True):
        assert torch.equal(actual, expected)
    # And the second pass normalised by the micro-batch, as the first did.
    assert_same_gradients(gradients(encoders), gradients(reference))


@pytest.mark.parametrize("fails_at", [2, 5])  # first pass, second pass
def test_an_exception_leaves_modules_and_random_state_in_order(fails_at):
    class Fails(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(WIDTH, DIMS), nn.BatchNorm1d(DIMS), nn.Dropout())
            self.calls = 0

        def forward(self, x):
            self.calls += 1
            if self.calls == fails_at:
                raise RuntimeError("out of something")
            return self.layers(x)

    encoder, text = Fails(), Tower()
    after_loss = []

    def loss(x, y):
        value = clip_loss(x, y)
        after_loss.append(torch.get_rng_state())
        return value

    with pytest.raises(RuntimeError, match="out of something"):
        GradientCache((encoder, text), loss, 2)(*pairs(6))
    norm = encoder.layers[1]
    assert norm.track_running_stats
    assert norm.num_batches_tracked == min(fails_at - 1, 3)
    if fails_at == 5:
        assert torch.equal(torch.get_rng_state(), after_loss[0])
    else:
        assert all(gradient is None for gradient in gradients(encoder, text))


# --- outputs --------------------------------------------------------------------------------------


def outputs_of(extra, loss, micro_batch_size=3, batch=BATCH):
    """One step of a model that returns two features and `extra(model, features)`."""
    model = TwoTowers()

    def encode(images, texts):
        x, y = model(images, texts)[:2]
        return {"x": x, "y": y, **extra(model, x)}

    batches = pairs(batch)
    value = GradientCache(encode, loss, micro_batch_size)(*batches)
    actual = gradients(model)
    model.zero_grad()
    expected = loss(**{k: v for k, v in encode(*batches).items() if v is not None})
    expected.backward()
    torch.testing.assert_close(value, expected.detach(), rtol=1e-12, atol=0)
    assert_same_gradients(actual, gradients(model))


@pytest.mark.parametrize("micro_batch_size", [2, 3, 7])
def test_an_output_of_one_number_per_sample(micro_batch_size):
    def loss(x, y, weight):
        assert weight.shape == (BATCH,)
        return (weight * (x * y).sum(1)).sum()

    outputs_of(lambda m, x: {"weight": x[:, 0].exp()}, loss, micro_batch_size)


def test_outputs_of_other_kinds():
    def loss(x, y, tokens, labels, bias=None):
        assert tokens.shape == (BATCH, 2, DIMS)
        assert labels.dtype == torch.int64
        assert bias is None
        return clip_loss(x, y) + tokens[labels > 0].square().sum()

    def extra(model, x):
        return {
            "tokens": torch.stack([x, 2 * x], dim=1),
            "labels": (x[:, 0] > 0).long(),
            "bias": None,  # left out of the loss's keywords
        }

    outputs_of(extra, loss)


def test_a_none_keeps_its_position():
    model = Tower()
    seen = []

    def loss(x, bias, y):
        seen.append(bias)
        return clip_loss(x, y)

    GradientCache(lambda a, b: (model(a), None, model(b)), loss, 3)(*pairs())
    assert seen == [None]
    assert model.layers[0].weight.grad.abs().sum() > 0


def test_an_output_that_the_loss_ignores_gets_no_gradient_as_in_a_plain_step():
    head = nn.Linear(DIMS, 3)

    def loss(x, y, aux):
        return clip_loss(x, y)

    outputs_of(lambda m, x: {"aux": head(x)}, loss)
    assert all(gradient is None for gradient in gradients(head))


def test_an_encoder_that_the_loss_ignores_has_no_second_pass():
    towers = (Tower(), Tower())
    GradientCache(towers, lambda x, y: x.square().sum() + x[:, 0].sum(), 3)(*pairs())
    assert [len(tower.graph_recorded) for tower in towers] == [6, 3]
    assert towers[1].layers[0].weight.grad is None


@pytest.mark.parametrize(
    ("extra", "micro_batch_size", "error", "message"),
    [
        (lambda m, x: {"z": x.exp().mean()}, 3, ValueError, r"'z'.*differs"),
        (lambda m, x: {"z": x[:, 0]}, 1, ValueError, r"'z'.*at least 2 rows"),
        (lambda m, x: {"z": m.image.layers[0].weight}, 3, ValueError, r"'z'.*\(8, 5\).*3 or 1"),
        (lambda m, x: {"z": x.T @ x}, 3, ValueError, r"'z'.*row per sample"),
        (lambda m, x: {"z": x @ x.T}, 3, ValueError, r"'z'.*\(3, 3\) or \(1, 1\)"),
        (lambda m, x: {"z": 3.0}, 3, TypeError, "'z'.*float"),
        (lambda m, x: {"z": None if len(x) == 1 else x}, 3, ValueError, "'z'.*None"),
        (lambda m, x: {"z": x} if len(x) == 1 else {}, 3, ValueError, "different outputs"),
    ],
)
def test_outputs_that_fit_no_rule(extra, micro_batch_size, error, message):
    model = TwoTowers()

    def encode(images, texts):
        x, y = model(images, texts)[:2]
        return {"x": x, "y": y, **extra(model, x)}

    with pytest.raises(error, match=message):
        GradientCache(encode, lambda x, y, z: clip_loss(x, y), micro_batch_size)(*pairs())
    assert all(gradient is None for gradient in gradients(model))


def test_a_scale_that_is_nan_gives_a_nan_loss():
    model = TwoTowers()
    model.logit_scale.data.fill_(torch.nan)
    assert GradientCache(model, biased_loss, 3)(*pairs()).isnan()


# --- batches --------------------------------------------------------------------------------------


class Encoding(UserDict):  # as Hugging Face's BatchEncoding: a mapping, with attributes
    def __getattr__(self, name):
        return self.data[name]


Point = namedtuple("Point", "first second")


def test_nested_batches_keep_their_types():
    tower = Tower()

    def encode_text(batch):
        assert isinstance(batch, Encoding)
        assert batch.mask is None
        return tower(batch.input_ids) * batch["more"]["weight"].unsqueeze(1)

    def encode_image(batch):
        assert isinstance(batch, Point)
        return tower(batch.first) + tower(batch.second[0])

    x, y = pairs()
    texts = Encoding(input_ids=x, mask=None, more={"weight": torch.rand(BATCH)})
    images = Point(y, [x + y])
    clip_loss(encode_text(texts), encode_image(images)).backward()
    expected = gradients(tower)
    tower.zero_grad()
    GradientCache((encode_text, encode_image), clip_loss, 3)(texts, images)
    assert_same_gradients(gradients(tower), expected)
    assert len(texts.input_ids) == BATCH  # the caller's batch is untouched


@pytest.mark.parametrize(
    ("batches", "error", "message"),
    [
        ((torch.ones(4, 5), torch.ones(3, 5)), ValueError, "batch 1: expected 4 rows.*got 3"),
        ((torch.ones(4, 5), {"a": [torch.ones(2)]}), ValueError, r"batch 1\['a'\]\[0\].*got 2"),
        ((torch.ones(0, 5), torch.ones(0, 5)), ValueError, r"batch 0.*at least one row.*\(0, 5\)"),
        ((torch.ones(4, 5), {}), ValueError, "batch 1.*got none"),
        ((torch.ones(4, 5), torch.tensor(1.0)), ValueError, r"batch 1.*shape \(\)"),
        ((torch.ones(4, 5), ["a", "b"]), TypeError, r"batch 1\[0\].*got str"),
        ((torch.ones(4, 5),), TypeError, "one per encoder, 2, got 1"),
        ((), TypeError, "at least one"),
    ],
)
def test_bad_batches(batches, error, message):
    towers = (Tower(), Tower())
    with pytest.raises(error, match=message):
        GradientCache(towers, clip_loss, 3)(*batches)
    assert [len(tower.graph_recorded) for tower in towers] == [0, 0]


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
        ({"scaler": 2.0}, TypeError, "scaler.*float"),
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
        GradientCache(towers, loss, 3)(*pairs())
    assert all(gradient is None for gradient in gradients(*towers))


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (lambda x: {"a": x, "b": x}, r"encoder 1 returned \(Tensor, Tensor\)"),
        (lambda x: (None,), r"encoder 1 returned \(NoneType\)"),
        (lambda x: "no", "encoder 1.*got str"),
    ],
)
def test_bad_outputs_of_several_encoders(output, message):
    with pytest.raises(TypeError, match=message):
        GradientCache((Tower(), output), clip_loss, 3)(*pairs())
