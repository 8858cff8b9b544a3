"""Micro-batches of at most so many tokens give the loss and gradients of the whole padded batch."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from megabatch import SortedByLength
from megabatch.gradient_cache import GradientCache
from megabatch.gradient_cache.by_length import tokens_by_length
from megabatch.gradient_cache.feed import divided
from megabatch.losses import ClipLoss, InfoNCELoss
from tests.gradient_cache import parallel
from tests.gradient_cache.test_by_length import LENGTHS, Texts, batches, made
from tests.gradient_cache.towers import assert_same
from tests.similarity.distributed.processes import World, on_processes


def tokenized(lengths=LENGTHS):
    """Texts as a tokenizer returns them: padded ids, their mask, and a length."""
    ids = batches(lengths)[1]
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "length": lengths}


@given(
    lengths=st.lists(st.integers(1, 50), max_size=30),
    tokens=st.integers(1, 200),
    size=st.none() | st.integers(1, 9),
    multiple=st.sampled_from([1, 8]),
)
def test_each_micro_batch_is_within_the_limit(lengths, tokens, size, multiple):
    batch = torch.arange(50 * len(lengths)).reshape(-1, 50)
    texts = SortedByLength(batch, torch.tensor(lengths, dtype=torch.int64), multiple=multiple)
    found = divided(len(lengths), size, {"text": texts}, tokens)
    parts = [texts.take(micro_batch.of("text")) for micro_batch in found]
    for part in parts:
        assert part.numel() <= tokens or len(part) == 1
    ids = torch.cat([part[:, 0] for part in parts]) if parts else batch[:, 0]
    assert texts.in_batch_order(ids).tolist() == batch[:, 0].tolist()
    rows = [row for one in found for row in range(one.rows.start, one.rows.stop)]
    assert rows == [*range(len(lengths))]  # of a batch without tokens
    assert all(not one.idle and one.rows.stop - one.rows.start <= (size or 30) for one in found)
    needed = room = 0  # filling one after the other
    for length in sorted(lengths, reverse=True):
        if not room:
            room = max(1, tokens // min(50, -(-length // multiple) * multiple))
            needed += 1
        room -= 1
    assert len(found) == max(needed, -(-len(lengths) // (size or 30)))


FORMS = {
    "with a mask": tokenized,
    "a SortedByLength": lambda: SortedByLength(tokenized(), LENGTHS),
    "ids in a mapping": lambda: {"input_ids": batches()[1]},
    "ids": lambda: batches()[1],
}


@pytest.mark.parametrize("kept", [0, 2])
@pytest.mark.parametrize("form", FORMS)
def test_gradients_are_those_of_the_whole_batch(form, kept):
    batch, tower, image = FORMS[form](), made(Texts), nn.Linear(5, 4)
    images, ids = batches()

    def encode(batch):
        return tower(batch if torch.is_tensor(batch) else batch["input_ids"])

    options = {"micro_batch_tokens": 24, "kept_micro_batches": kept}
    step = GradientCache((image, encode), InfoNCELoss(0.1), 3, **options)
    rows = []
    image.register_forward_pre_hook(lambda _, args: rows.append(len(args[0])))
    assert_same(
        lambda: step(images, batch),
        lambda: InfoNCELoss(0.1)(image(images), tower(ids)),
        *(tower, image),
        tolerance=1e-12,
    )
    # Lengths 30, 17, 9 9, 8 3 1 are cut to multiples of 8; the first is longer than the limit.
    shapes = [(1, 30), (1, 24), (1, 16), (1, 16), (3, 8)]
    shapes = [(1, 30)] * 7 if form.startswith("ids") else shapes
    assert tower.seen[1:] == shapes + shapes[: len(shapes) - kept]
    assert rows[1:] == ([3, 3, 1] * 2)[: 6 - kept]


@pytest.mark.parametrize("tokens", [16, 32, 1000])
@pytest.mark.parametrize("size", [1, 3, 100])
def test_a_model_of_images_and_texts(size, tokens):
    """Has as many micro-batches as the images or the texts need, the larger number."""
    (images, ids), model = batches(), made()
    texts = SortedByLength(ids, LENGTHS, outputs="text_features")
    step = GradientCache(model, ClipLoss(), size, micro_batch_tokens=tokens)
    assert_same(
        lambda: step(images, texts),
        lambda: ClipLoss()(**model(images, ids)),
        model,
        tolerance=1e-12,
    )
    count = max(-(-7 // size), {16: 6, 32: 4, 1000: 1}[tokens])
    shapes = model.text.seen[1:]
    assert len(shapes) == (2 * count if count > 1 else 1)
    assert all(rows == 1 or rows * columns <= tokens for rows, columns in shapes)


def test_padding_on_the_left_counts():
    """It cannot be cut, as positions are often counted from the first column."""
    tower, (_, ids) = made(Texts), batches()
    left = {"input_ids": ids.flip(1), "attention_mask": (ids.flip(1) != 0).long()}
    step = GradientCache(
        (lambda batch: tower(batch["input_ids"]),), torch.Tensor.std, None, micro_batch_tokens=60
    )
    assert_same(lambda: step(left), lambda: tower(left["input_ids"]).std(), tower, tolerance=1e-12)
    assert tower.seen[1:] == [(2, 30)] * 3 + [(1, 30)] + [(2, 30)] * 3 + [(1, 30)]


def test_random_numbers_are_those_of_one_graph():
    """Through the same micro-batches, one after the other."""
    tower, dropout = made(Texts), nn.Dropout(0.3)

    def encode(batch):
        return dropout(tower(batch["input_ids"]))

    def one_graph():
        texts = tokens_by_length("batch", tokenized())
        parts = [texts.take(one.of("")) for one in divided(7, None, {"": texts}, 24)]
        return texts.in_batch_order(torch.cat([encode(part) for part in parts])).std()

    step = GradientCache((encode,), torch.Tensor.std, micro_batch_tokens=24)
    assert_same(lambda: step(tokenized()), one_graph, tower, tolerance=1e-12)


@on_processes(2)
def test_several_processes(world: World) -> None:
    """They have different numbers of micro-batches: one has longer texts, or none."""
    lengths = LENGTHS.sort().values
    for sizes, counts in (([5, 2], [3, 2]), ([0, 7], [0, 5])):
        whole = made()
        ClipLoss(group="local")(**whole(*batches(lengths))).backward()
        images, ids, own = (all_.split(sizes)[world.rank] for all_ in (*batches(lengths), lengths))
        texts = SortedByLength(ids, own, outputs=["text_features"])
        assert len(divided(len(own), 9, {"texts": texts}, 24)) == counts[world.rank]
        wrappers = parallel.under_ddp, parallel.under_fsdp
        for wrap, kept in itertools.product(wrappers, (0, 2)):
            model = wrap(made())
            step = GradientCache(
                model, ClipLoss(), 9, micro_batch_tokens=24, kept_micro_batches=kept
            )
            step(images, texts).backward()
            parallel.assert_same(model, parallel.gradients(whole))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({}, TypeError, "micro_batch_size: expected an int, or micro_batch_tokens, got neither"),
        ({"micro_batch_tokens": 0}, ValueError, "micro_batch_tokens: expected at least 1, got 0"),
        ({"micro_batch_tokens": 8.5}, TypeError, "micro_batch_tokens: expected an int, got float"),
        ({"micro_batch_tokens": (8, 8)}, ValueError, "micro_batch_tokens: expected one, or one pe"),
    ],
)
def test_wrong_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        GradientCache((made(Texts),), torch.Tensor.std, **arguments)


def test_batches_whose_tokens_are_not_known_are_refused():
    (images, ids), tower = batches(), made(Texts)
    tokens, loss = {"micro_batch_tokens": 24}, torch.Tensor.std
    step = GradientCache((tower,), loss, **tokens)
    with pytest.raises(ValueError, match=r"tokens of batch 0 of encoder 0 are not known; expected"):
        step(images)
    mixed = {**tokenized(), "pixel_values": torch.rand(7, 3, 4, 4)}
    with pytest.raises(
        ValueError, match=r"shape \(7, 30\).* got batch 0\['pixel_values'\] with \(7, 3"
    ):
        step(mixed)
    several = GradientCache(made(), loss, 2, **tokens)
    with pytest.raises(
        ValueError, match="tokens of batch 0 and batch 1 of the model are not known"
    ):
        several(images, ids)
    texts = SortedByLength(ids, LENGTHS, outputs="text_features")
    with pytest.raises(ValueError, match="tokens of batch 0 of the model are not known"):
        GradientCache(made(), loss, **tokens)(images, texts)
    assert tower.seen == []
