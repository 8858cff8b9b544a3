"""Nested batches and bad ones."""

from collections import UserDict, namedtuple

import pytest
import torch

from megabatch.gradient_cache import GradientCache
from tests.gradient_cache.towers import (
    BATCH,
    Tower,
    assert_same,
    clip_loss,
    pairs,
)


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
    step = GradientCache((encode_text, encode_image), clip_loss, 3)
    assert_same(
        lambda: step(texts, images),
        lambda: clip_loss(encode_text(texts), encode_image(images)),
        tower,
    )
    assert len(texts.input_ids) == BATCH  # the caller's batch is untouched


class OfKeywords(Tower):
    def forward(self, inputs=None, mask=None):
        return super().forward(inputs * mask[:, None])


@pytest.mark.parametrize("kind", [dict, Encoding])
@pytest.mark.parametrize("wrap", [lambda tower: tower, torch.nn.DataParallel])
def test_an_encoder_that_takes_keywords_is_shown_how_to_take_a_mapping(kind, wrap):
    tower = OfKeywords()
    x, y = pairs()
    batches = [kind(inputs=inputs, mask=torch.rand(BATCH)) for inputs in (x, y)]
    step = GradientCache((wrap(tower), wrap(tower)), clip_loss, 3)
    message = rf"encoder 0 raised \w+ for a {kind.__name__} as one .* model\(\*\*batch\)"
    with pytest.raises(TypeError, match=message) as raised:
        step(*batches)
    assert raised.value.__cause__ is not None
    step = GradientCache((lambda batch: tower(**batch),) * 2, clip_loss, 3)
    assert_same(
        lambda: step(*batches), lambda: clip_loss(*(tower(**batch) for batch in batches)), tower
    )


@pytest.mark.parametrize("error", [TypeError, AttributeError, ValueError])
def test_errors_of_an_encoder_that_takes_a_mapping_are_its_own(error):
    def encode(batch):
        raise error("my own")

    with pytest.raises(error, match="my own"):
        GradientCache((encode, Tower()), clip_loss, 3)({"inputs": pairs()[0]}, pairs()[1])


@pytest.mark.parametrize("size", [1, 3, 100])
@pytest.mark.parametrize("kind", [list, tuple])
@pytest.mark.parametrize("device", [None, "cpu"])
def test_lists_with_an_item_for_each_row_are_divided(kind, size, device):
    tower, seen = Tower(), []
    words = kind(["one", "three", "four", "seven", ["a", "b"], None, 3.5])
    sizes = [len(str(word)) for word in words]

    def encode(batch):
        assert batch["more"] == {"sizes": (224, 224)}  # of another length: unchanged
        seen.append(batch["words"])
        assert isinstance(seen[-1], kind)
        weights = torch.tensor([float(len(str(word))) for word in batch["words"]])
        return tower(batch["input"]) * weights[:, None]

    x, y = pairs()
    batch = {"input": x, "words": words, "more": {"sizes": (224, 224)}}
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
        ((torch.ones(0, 5), torch.ones(0, 5)), ValueError, "batch 0.*at least one row.*got 0"),
        ((torch.ones(4, 5), {}), ValueError, "batch 1.*got none"),
        ((torch.ones(4, 5), torch.tensor(1.0)), ValueError, r"batch 1.*shape \(\)"),
        ((torch.ones(4, 5), ["a", "b"]), ValueError, "batch 1: expected tensors, got none"),
        ((torch.ones(4, 5),), TypeError, "one per encoder, 2, got 1"),
        ((), TypeError, "at least one"),
    ],
)
def test_bad_batches(batches, error, message):
    towers = (Tower(), Tower())
    with pytest.raises(error, match=message):
        GradientCache(towers, clip_loss, 3)(*batches).backward()
    assert [len(tower.graph_recorded) for tower in towers] == [0, 0]
