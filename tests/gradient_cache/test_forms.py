"""The forms of batches and outputs; rows and micro-batch sizes of each encoder; bad ones."""

import functools
from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass
from types import MappingProxyType

import pytest
import torch
from torch import nn
from transformers.utils import ModelOutput

from megabatch.gradient_cache import GradientCache
from tests.gradient_cache.towers import (
    BATCH,
    Tower,
    TwoTowers,
    assert_same,
    biased_loss,
    clip_loss,
    pairs,
)


@pytest.mark.parametrize("size", [3, 100])
def test_one_model_takes_batches_by_keyword(size):
    class Model(TwoTowers):
        def forward(self, images, *, texts, mask=None, mode):
            assert (mask is None, mode) == (True, "train")
            return super().forward(images, texts["ids"])

    model = Model(dict)
    images, texts = pairs()
    weight = torch.rand(BATCH)

    def loss(weight, **outputs):
        assert weight.shape == (BATCH,)
        return biased_loss(**outputs) * weight.sum()

    names = ("images", "texts", "mask", "mode")
    step = GradientCache(model, loss, size, input_names=names)
    inputs = {"texts": {"ids": texts}, "mask": None, "mode": "train"}
    for call in (
        functools.partial(step, images, **inputs, weight=weight),
        functools.partial(step, images=images, **inputs, weight=weight),
    ):
        assert_same(call, lambda: loss(weight, **model(images, **inputs)), model)


@dataclass
class TwoTowersOutput(ModelOutput):
    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    image_embeds: torch.Tensor | None = None
    text_embeds: torch.Tensor | None = None
    scale: torch.Tensor | None = None
    vision: ModelOutput | None = None


class HuggingFaceLike(TwoTowers):
    """Returns logits of its micro-batch and an inner output, as Hugging Face's CLIP does."""

    def __init__(self, kind=TwoTowersOutput):
        super().__init__()
        self.kind = kind

    def forward(self, images, texts):
        x, y, scale, _ = super().forward(images, texts)
        return self.kind(
            logits=x @ y.T, image_embeds=x, text_embeds=y, scale=scale, vision=ModelOutput(a=x)
        )


WANTED = ["image_embeds", "text_embeds", "scale"]


def read_only(**items):
    return MappingProxyType(items)


@pytest.mark.parametrize("kind", [TwoTowersOutput, UserDict, OrderedDict, dict, read_only])
def test_the_loss_gets_a_mapping_of_the_models_class_or_keywords(kind):
    model, batches = HuggingFaceLike(kind), pairs()
    model.logit_bias.requires_grad_(False)

    def loss(outputs):
        return 2 * clip_loss(*(outputs[name] for name in WANTED))

    def looks(*one, factor, **named):
        assert len(one) == (kind not in (dict, read_only))
        for outputs in one:
            assert type(outputs) is kind
            assert outputs["logits"] is outputs["vision"] is None
            if kind is TwoTowersOutput:
                assert outputs.image_embeds is outputs["image_embeds"]
        return factor / 2 * loss(*one or [named])

    step = GradientCache(model, looks, 3, outputs=WANTED)
    assert_same(lambda: step(*batches, factor=2), lambda: loss(model(*batches)), model)


@pytest.mark.parametrize("outputs", ["sentence_embedding", ("sentence_embedding", "pooled")])
def test_one_output_of_each_encoder(outputs):
    """Like sentence-transformers' models, which add outputs to their inputs."""
    tower = Tower()

    def encode(features):
        hidden = tower(features["input"])
        return {**features, "sentence_embedding": hidden, "pooled": hidden, "other": hidden.mean()}

    x, y = pairs()
    batches = [{"input": batch, "modality": "text"} for batch in (x, y)]
    step = GradientCache((encode, encode), clip_loss, 3, outputs=outputs)
    assert_same(lambda: step(*batches), lambda: clip_loss(tower(x), tower(y)), tower)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"micro_batch_size": 0}, ValueError, "micro_batch_size.*got 0"),
        ({"micro_batch_size": (2, 3, 4)}, ValueError, "one per encoder, 2, got 3"),
        ({"micro_batch_size": (2, 0)}, ValueError, "at least 1, got 0"),
        ({"micro_batch_size": (2, 1.5)}, TypeError, "expected an int, got float"),
        ({"encoders": abs, "micro_batch_size": (2, 3)}, TypeError, "expected an int, got tuple"),
        ({"kept_micro_batches": -1}, ValueError, "kept_micro_batches: .* at least 0, got -1"),
        ({"kept_micro_batches": 1.0}, TypeError, "kept_micro_batches: expected an int, got float"),
        ({"kept_micro_batches": (1, 2, 3)}, ValueError, "kept_micro_batches: .*per encoder, 2"),
        ({"encoders": ()}, ValueError, "encoders.*none"),
        ({"encoders": (abs, 3)}, TypeError, "encoders.*int"),
        ({"encoders": "model"}, TypeError, "encoders.*str"),
        ({"loss": None}, TypeError, "loss.*NoneType"),
        ({"group": "world"}, TypeError, "group.*world"),
        ({"feature_dtype": "bfloat16"}, TypeError, "feature_dtype"),
        ({"feature_dtype": torch.int64}, TypeError, "feature_dtype"),
        ({"input_names": "query"}, TypeError, "input_names: expected a sequence of strings"),
        ({"input_names": ["query"]}, ValueError, "input_names: expected one per encoder, 2"),
        ({"outputs": ["a", "b", "c"]}, ValueError, "outputs: expected one, or one per encoder, 2"),
        ({"outputs": []}, ValueError, "outputs: expected keys"),
    ],
)
def test_bad_arguments(options, error, message):
    arguments = {"encoders": (abs, abs), "loss": clip_loss, "micro_batch_size": 2}
    with pytest.raises(error, match=message):
        GradientCache(**arguments | options)
    if "kept_micro_batches" in options:
        step = GradientCache((Tower(), Tower()), clip_loss, 2)
        step.kept_micro_batches = options["kept_micro_batches"]
        with pytest.raises(error, match=message):
            step(*pairs())


def test_bad_calls():
    towers, (x, y) = (Tower(), Tower()), pairs()
    step = GradientCache(towers, clip_loss, 3, input_names=("query", "passage"))
    assert step(passage=y, query=x, logit_scale=2.0) == step(x, y, logit_scale=2.0)
    with pytest.raises(TypeError, match="all by keyword, got 1 by position and passage by keyword"):
        step(x, passage=y)
    with pytest.raises(TypeError, match="one per encoder, 2, got 1"):
        step(query=x)
    step = GradientCache(TwoTowers(), biased_loss, 3)
    with pytest.raises(ValueError, match="batch 1: expected 7 rows as in batch 0, got 6"):
        step(x, y[:6])
    with pytest.raises(ValueError, match="batch 0 and batch 1: expected tensors, got none"):
        step("a", None)
    step = GradientCache(TwoTowers(dict), biased_loss, 3, outputs=["image_features", "text"])
    with pytest.raises(ValueError, match=r"the model to return 'text', got 'image_features', 't"):
        step(x, y)
    step = GradientCache(HuggingFaceLike(dict), clip_loss, 3)
    with pytest.raises(TypeError, match=r"'vision'.*ModelOutput \(outputs= names those"):
        step(x, y)


class Encoding(UserDict):  # as Hugging Face's BatchEncoding: a mapping, with attributes
    def __getattr__(self, name):
        return self.data[name]


Point = namedtuple("Point", "first second")


@pytest.mark.parametrize(("size", "kind", "device"), [(3, list, "cpu"), (100, tuple, None)])
def test_nested_batches_keep_their_types(kind, size, device):
    """Lists with an item for each row are divided, other values are passed unchanged."""
    tower, (x, y), seen = Tower(), pairs(), []
    words = kind(["one", "three", "four", "seven", ["a", "b"], None, 3.5])
    rest = {
        **{"modality": "text", "names": ["a", "b"], "factor": 2.0, "flags": {True, False}},
        **{"none": None, "object": object(), "bytes": b"abc", "sizes": {"sizes": (224, 224)}},
    }

    def encode_text(batch):
        assert isinstance(batch, Encoding)
        assert {name: batch[name] for name in rest} == rest
        assert type(batch["more"]) is TwoTowersOutput
        seen.append(batch.words)
        assert isinstance(seen[-1], kind)
        weights = torch.tensor([float(len(str(word))) for word in batch.words])
        return tower(batch.input_ids) * (weights + batch["more"].scale)[:, None]

    def encode_image(batch):
        assert isinstance(batch, Point)
        return tower(batch.first) + tower(batch.second[0])

    more = TwoTowersOutput(scale=torch.rand(BATCH))
    texts, images = Encoding(input_ids=x, words=words, more=more, **rest), Point(y, [x + y])
    step = GradientCache((encode_text, encode_image), clip_loss, size, device=device)
    plain = lambda: clip_loss(encode_text(texts), encode_image(images))  # noqa: E731
    assert_same(lambda: step(texts, images), plain, tower)
    assert seen[1] == words[:size]
    assert texts.input_ids is x  # the caller's batch is untouched
    assert texts.words is words


def test_an_encoder_that_takes_keywords_is_shown_how_to_take_a_mapping():
    tower, batches = Tower(), [Encoding(images=x, texts=x) for x in pairs()]
    message = r"encoder 0 failed for a mapping as one argument .* model\(\*\*batch\)"
    with pytest.raises(TypeError, match=message) as raised:
        GradientCache((TwoTowers(), tower), clip_loss, 3)(*batches)
    assert raised.value.__cause__ is not None

    def broken(batch):
        raise AttributeError("my own")

    with pytest.raises(AttributeError, match="my own"):
        GradientCache((broken, tower), clip_loss, 3)(*batches)


X = torch.ones(4, 5)


@pytest.mark.parametrize(
    ("batches", "error", "message"),
    [
        (
            (X, {"a": [X[:2], X[:3]]}),
            ValueError,
            r"\['a'\]\[1\]: expected 2 rows .*got 3",
        ),
        ((X[:0], X[:0]), ValueError, "batches: .*at least one row of encoder 0.*got 0"),
        ((X, {}), ValueError, "batch 1.*got none"),
        ((X, torch.tensor(1.0)), ValueError, r"batch 1.*shape \(\)"),
        ((X, ["a", "b"]), ValueError, "batch 1: expected tensors, got none"),
        ((X,), TypeError, "one per encoder, 2, got 1"),
        ((), TypeError, "at least one"),
        (({"x": nn.Linear(5, 5)(X)}, X), ValueError, r"batch 0\['x'\] of encoder 0: .*AddmmBackw"),
    ],
)
def test_bad_batches(batches, error, message):
    towers = (Tower(), Tower())
    with pytest.raises(error, match=message):
        GradientCache(towers, clip_loss, 3)(*batches).backward()
    assert [len(tower.graph_recorded) for tower in towers] == [0, 0]
