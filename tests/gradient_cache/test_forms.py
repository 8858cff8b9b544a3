"""The forms of batches and outputs; rows and micro-batch sizes of each encoder; bad ones."""

import functools
from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass
from types import MappingProxyType

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.utils import ModelOutput

from megabatch.gradient_cache import GradientCache
from tests.gradient_cache.towers import (
    BATCH,
    WIDTH,
    Tower,
    TwoTowers,
    assert_same,
    biased_loss,
    clip_loss,
    pairs,
)

SIZES = [3, 100]


@pytest.mark.parametrize("size", SIZES)
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
    loss = step(images, **inputs, weight=weight)
    texts.zero_()
    with pytest.raises(RuntimeError, match=r"texts\['ids'\] of the model was changed in place"):
        loss.backward()


@pytest.mark.parametrize("size", SIZES)
def test_each_encoder_takes_a_batch_by_keyword(size):
    towers, (x, y) = (Tower(), Tower()), pairs()
    step = GradientCache(towers, clip_loss, size, input_names=["query", "passage"])
    assert_same(
        lambda: step(passage=y, query=x, logit_scale=2.0),
        lambda: clip_loss(towers[0](x), towers[1](y), 2.0),
        *towers,
    )


def retrieval_loss(queries, passages):
    """The passages of a query are consecutive, its positive first."""
    k = len(passages) // len(queries)
    return F.cross_entropy(queries @ passages.T, torch.arange(len(queries)) * k)


@pytest.mark.parametrize("sizes", [3, (2, 9), (7, 100), (3, 28), [100, 100]])
@pytest.mark.parametrize("shared", [True, False])
def test_encoders_with_different_numbers_of_rows(sizes, shared):
    queries, passages = torch.randn(BATCH, WIDTH), torch.randn(4 * BATCH, WIDTH)
    towers = (tower := Tower(), tower if shared else Tower())
    rows = {"query": [], "passage": []}

    def counted(kind, encoder, x):
        rows[kind].append(len(x))
        return encoder(x)

    encoders = [functools.partial(counted, k, t) for k, t in zip(rows, towers, strict=True)]
    step = GradientCache(encoders, retrieval_loss, sizes)
    assert_same(
        lambda: step(queries, passages),
        lambda: retrieval_loss(towers[0](queries), towers[1](passages)),
        *towers,
    )
    each = (sizes, sizes) if isinstance(sizes, int) else sizes
    counts = (BATCH, 4 * BATCH)
    passes = 1 if all(size >= n for size, n in zip(each, counts, strict=True)) else 2
    for kind, size, count in zip(rows, each, counts, strict=True):
        parts = [len(part) for part in torch.arange(count).split(size)]
        assert rows[kind] == parts * passes


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


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", [TwoTowersOutput, UserDict, OrderedDict])
def test_the_loss_gets_a_mapping_of_the_models_class(kind, size):
    model, batches = HuggingFaceLike(kind), pairs()
    model.logit_bias.requires_grad_(False)

    def loss(outputs, factor):
        assert type(outputs) is kind
        if kind is TwoTowersOutput:
            assert outputs.image_embeds is outputs["image_embeds"]
        return factor * clip_loss(*(outputs[name] for name in WANTED))

    def looks(outputs, factor):
        assert outputs["logits"] is None
        assert outputs["vision"] is None
        return loss(outputs, factor)

    step = GradientCache(model, looks, size, outputs=WANTED)
    assert_same(lambda: step(*batches, factor=2), lambda: loss(model(*batches), 2), model)


@pytest.mark.parametrize("kind", [dict, lambda **items: MappingProxyType(items)])
def test_outputs_of_a_dict_by_name(kind):
    model, batches = HuggingFaceLike(kind), pairs()
    step = GradientCache(
        model, lambda **named: clip_loss(*(named[name] for name in WANTED)), 3, outputs=WANTED
    )
    plain = lambda: clip_loss(*(model(*batches)[name] for name in WANTED))  # noqa: E731
    assert_same(lambda: step(*batches), plain, model)


def test_outputs_of_a_tuple_by_position():
    model, batches = TwoTowers(), pairs()
    step = GradientCache(model, lambda y, x: clip_loss(x, y), 3, outputs=(1, 0))
    assert_same(lambda: step(*batches), lambda: clip_loss(*model(*batches)[:2]), model)


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


def test_nested_batches_keep_their_types():
    tower = Tower()

    def encode_text(batch):
        assert isinstance(batch, Encoding)
        assert batch.mask is None
        assert type(batch["more"]) is TwoTowersOutput
        return tower(batch.input_ids) * batch["more"].scale.unsqueeze(1)

    def encode_image(batch):
        assert isinstance(batch, Point)
        return tower(batch.first) + tower(batch.second[0])

    x, y = pairs()
    texts = Encoding(input_ids=x, mask=None, more=TwoTowersOutput(scale=torch.rand(BATCH)))
    images = Point(y, [x + y])
    step = GradientCache((encode_text, encode_image), clip_loss, 3)
    assert_same(
        lambda: step(texts, images),
        lambda: clip_loss(encode_text(texts), encode_image(images)),
        tower,
    )
    assert texts.input_ids is x  # the caller's batch is untouched


class OfKeywords(Tower):
    def forward(self, inputs=None, mask=None):
        return super().forward(inputs * mask[:, None])


@pytest.mark.parametrize("wrap", [lambda tower: tower, torch.nn.DataParallel])
def test_an_encoder_that_takes_keywords_is_shown_how_to_take_a_mapping(wrap):
    tower = OfKeywords()
    batches = [Encoding(inputs=inputs, mask=torch.rand(BATCH)) for inputs in pairs()]
    step = GradientCache((wrap(tower), wrap(tower)), clip_loss, 3)
    message = r"encoder 0 failed for a mapping as one argument .* model\(\*\*batch\)"
    with pytest.raises(TypeError, match=message) as raised:
        step(*batches)
    assert raised.value.__cause__ is not None
    step = GradientCache((lambda batch: tower(**batch),) * 2, clip_loss, 3)
    assert_same(
        lambda: step(*batches), lambda: clip_loss(*(tower(**batch) for batch in batches)), tower
    )

    def broken(batch):
        raise AttributeError("my own")

    with pytest.raises(AttributeError, match="my own"):
        GradientCache((broken, tower), clip_loss, 3)(*batches)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", [list, tuple])
@pytest.mark.parametrize("device", [None, "cpu"])
def test_lists_with_an_item_for_each_row_are_divided(kind, size, device):
    """Other values are passed unchanged."""
    tower, seen = Tower(), []
    words = kind(["one", "three", "four", "seven", ["a", "b"], None, 3.5])
    sizes = [len(str(word)) for word in words]
    rest = {
        **{"modality": "text", "names": ["a", "b"], "factor": 2.0, "flags": {True, False}},
        **{"none": None, "object": object(), "bytes": b"abc", "more": {"sizes": (224, 224)}},
    }

    def encode(batch):
        assert {k: v for k, v in batch.items() if k not in ("input", "words")} == rest
        seen.append(batch["words"])
        assert isinstance(seen[-1], kind)
        weights = torch.tensor([float(len(str(word))) for word in batch["words"]])
        return tower(batch["input"]) * weights[:, None]

    x, y = pairs()
    batch = {"input": x, "words": words, **rest}
    step = GradientCache((encode, tower), clip_loss, size, device=device)
    assert_same(
        lambda: step(batch, y),
        lambda: clip_loss(tower(x) * torch.tensor(sizes)[:, None], tower(y)),
        tower,
    )
    assert seen[0] == words[:size]
    assert batch["words"] is words


@pytest.mark.parametrize(
    ("batches", "error", "message"),
    [
        (
            (torch.ones(4, 5), {"a": [torch.ones(2), torch.ones(3)]}),
            ValueError,
            r"batch 1\['a'\]\[1\]: expected 2 rows as in batch 1\['a'\]\[0\], got 3",
        ),
        (
            (torch.ones(0, 5), torch.ones(0, 5)),
            ValueError,
            "batches: .*at least one row of encoder 0.*got 0",
        ),
        ((torch.ones(4, 5), {}), ValueError, "batch 1.*got none"),
        ((torch.ones(4, 5), torch.tensor(1.0)), ValueError, r"batch 1.*shape \(\)"),
        ((torch.ones(4, 5), ["a", "b"]), ValueError, "batch 1: expected tensors, got none"),
        ((torch.ones(4, 5),), TypeError, "one per encoder, 2, got 1"),
        ((), TypeError, "at least one"),
        (
            ({"x": nn.Linear(5, 5)(torch.ones(4, 5))}, torch.ones(4, 5)),
            ValueError,
            r"batch 0\['x'\] of encoder 0: expected a tensor that is not computed.*AddmmBackward0",
        ),
    ],
)
def test_bad_batches(batches, error, message):
    towers = (Tower(), Tower())
    with pytest.raises(error, match=message):
        GradientCache(towers, clip_loss, 3)(*batches).backward()
    assert [len(tower.graph_recorded) for tower in towers] == [0, 0]
