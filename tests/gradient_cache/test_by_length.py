"""Sequences sorted by length and cut give the loss and gradients of the padded batch."""

import functools
import itertools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from megabatch import SortedByLength
from megabatch.gradient_cache import GradientCache
from megabatch.gradient_cache.batches import (
    MicroBatch,
    equal_rows,
    equal_token_runs,
    equal_tokens,
    fewest_tokens,
    growth,
)
from megabatch.losses import ClipLoss
from tests.gradient_cache import parallel
from tests.gradient_cache.towers import (
    MICRO_BATCH_SIZES,
    assert_same,
    clip_loss,
)
from tests.similarity.distributed.processes import World, on_processes

ROWS, COLUMNS, WORDS = 7, 30, 9
LENGTHS = torch.tensor([3, 30, 9, 1, 17, 9, 8])


class Texts(nn.Module):
    """The mean over tokens without padding, which is token 0."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.words = nn.Embedding(WORDS, 6)
        self.positions = nn.Parameter(torch.randn(COLUMNS, 6))
        self.dropout = nn.Dropout(dropout)
        self.linear = nn.Linear(6, 4)
        self.seen = []

    def forward(self, tokens):
        self.seen.append(tuple(tokens.shape))
        x = self.dropout((self.words(tokens) + self.positions[: tokens.shape[1]]).tanh())
        present = (tokens != 0).unsqueeze(2)
        return F.normalize(self.linear((x * present).sum(1) / present.sum(1)), dim=-1)


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.image, self.text = nn.Linear(5, 4), Texts()
        self.scale = nn.Parameter(torch.tensor([1.1]))  # FSDP2 takes no 0-d parameter

    def forward(self, images, texts):
        return {
            "image_features": F.normalize(self.image(images), dim=-1),
            "text_features": self.text(texts),
            "logit_scale": self.scale.exp(),
        }


def made(kind=Pair, **options):
    torch.manual_seed(0)
    return kind(**options).double()


def batches(lengths=LENGTHS):
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(len(lengths), 5, generator=generator, dtype=torch.float64)
    tokens = torch.randint(1, WORDS, (len(lengths), COLUMNS), generator=generator)
    return images, tokens * (torch.arange(COLUMNS) < lengths[:, None])


@pytest.mark.parametrize("size", MICRO_BATCH_SIZES)
def test_an_encoder_for_each_batch(size):
    (images, tokens), model = batches(), made()
    texts = SortedByLength(tokens, LENGTHS)
    encoders = (lambda x: F.normalize(model.image(x), dim=-1), model.text)

    def plain():
        return clip_loss(encoders[0](images), encoders[1](tokens))

    for on_host in (None, True):
        step = GradientCache(encoders, clip_loss, size, gradients_on_host=on_host)
        assert_same(lambda step=step: step(images, texts), plain, model, tolerance=1e-12)


@pytest.mark.parametrize("device", [None, "cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("size", [2, 100])
def test_a_model_of_all_batches(device, size):
    (images, tokens), model = batches(), made().to(device)
    texts = SortedByLength(tokens, LENGTHS, outputs="text_features")
    step = GradientCache(model, ClipLoss(), size, device=device, input_names=["images", "texts"])

    def plain():
        return ClipLoss()(**model(images.to(device), tokens.to(device)))

    assert_same(lambda: step(images=images, texts=texts), plain, model, tolerance=1e-12)
    with torch.no_grad():
        torch.testing.assert_close(step(images, texts), plain(), rtol=0, atol=1e-12)


def test_micro_batches_have_equal_tokens_and_are_cut_to_their_longest_row():
    tower, (_, tokens) = made(Texts), batches()
    step = GradientCache((tower,), lambda x: x.sum(), 2)
    step(SortedByLength(tokens, LENGTHS)).backward()
    assert tower.seen == [(1, 30), (1, 24), (2, 16), (3, 8)] * 2  # lengths 30, 17, 9 9, 8 3 1
    tower.seen.clear()
    with torch.no_grad():
        step(SortedByLength(tokens, LENGTHS, multiple=1))
    assert tower.seen == [(1, 30), (1, 17), (3, 9), (2, 3)]


class Stored:
    """Rows that are made on access, and only so many at a time."""

    def __init__(self, rows, most):
        self.rows, self.most = rows, most

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, rows):
        assert rows.stop - rows.start <= self.most
        return self.rows[rows]


@pytest.mark.parametrize("kept", [0, 2, 4])
@pytest.mark.parametrize("on_host", [False, True])
def test_other_batches_of_the_encoder_keep_equal_rows(kept, on_host):
    (images, tokens), model = batches(), made()
    texts = SortedByLength(tokens, LENGTHS, outputs="text_features")
    step = GradientCache(
        model, ClipLoss(), 2, device="cpu", gradients_on_host=on_host, kept_micro_batches=kept
    )
    assert_same(
        lambda: step(Stored(images, 2), texts),
        lambda: ClipLoss()(**model(images, tokens)),
        model,
        tolerance=1e-12,
    )
    _, *seen = model.text.seen
    assert seen[:4] == [(1, 30), (1, 24), (2, 16), (3, 8)]
    assert len(seen) == 8 - kept


def test_nested_batches_are_cut_and_sorted_together():
    """With lists that have an item for each row."""
    tower, (_, tokens) = made(Texts), batches()
    weights = torch.rand(ROWS, dtype=torch.float64)
    extra = torch.rand(ROWS, COLUMNS, 2, dtype=torch.float64)

    def encode(batch):
        ids, weight, (more,) = batch["ids"], batch["weight"], batch["more"]
        assert batch["flag"] == "kept"
        assert ids.shape == more.shape[:2]
        assert batch["names"] == [f"{n} tokens" for n in (ids != 0).sum(1).tolist()]
        return tower(ids) * weight[:, None] + more[:, 0, :1]

    names = [f"{length} tokens" for length in LENGTHS]
    batch = {"ids": tokens, "weight": weights, "more": [extra], "flag": "kept", "names": names}
    found = []
    step = GradientCache((encode,), lambda x: found.append(x) or x.sum(), 2)
    step(SortedByLength(batch, LENGTHS)).backward()
    torch.testing.assert_close(found[0], encode(batch))


def test_a_batch_that_requires_a_gradient_gets_it():
    layer, x = nn.Linear(6, 4), nn.Parameter(torch.rand(ROWS, COLUMNS, 6))
    present = (torch.arange(COLUMNS) < LENGTHS[:, None]).unsqueeze(2)

    def encode(batch):
        return layer((batch["x"] * batch["present"]).sum(1))

    step = GradientCache((encode,), lambda y: y.square().sum(), 3)
    batch = {"x": x, "present": present}
    holder = nn.ParameterList([x])
    assert_same(
        lambda: step(SortedByLength(batch, LENGTHS)),
        lambda: encode(batch).square().sum(),
        layer,
        holder,
    )


def test_a_batch_changed_in_place_is_named():
    tower, (_, tokens) = made(Texts), batches()
    loss = GradientCache((tower,), lambda x: x.sum(), 3)(SortedByLength(tokens, LENGTHS))
    tokens[0, 0] = 1
    with pytest.raises(RuntimeError, match="batch 0 of encoder 0 was changed in place"):
        loss.backward()


@on_processes(2)
def test_several_processes(world: World) -> None:
    """Shards of different lengths and sizes, one of them empty, under DDP and FSDP2."""
    for sizes in ([4, 3], [6, 1], [0, 7]):
        whole = made()
        ClipLoss(group="local")(**whole(*batches())).backward()
        images, tokens, lengths = (
            batch.split(sizes)[world.rank] for batch in (*batches(), LENGTHS)
        )
        texts = SortedByLength(tokens, lengths, outputs=["text_features"])
        wrappers = parallel.under_ddp, parallel.under_fsdp
        for wrap, kept in itertools.product(wrappers, (0, 2)):
            model = wrap(made())
            step = GradientCache(model, ClipLoss(), 2, kept_micro_batches=kept)
            step(images, texts).backward()
            parallel.assert_same(model, parallel.gradients(whole))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"lengths": LENGTHS - 1}, ValueError, "lengths: expected 1 to 30.* got 0 to 29"),
        ({"lengths": LENGTHS + 1}, ValueError, "lengths: expected 1 to 30.* got 2 to 31"),
        ({"lengths": LENGTHS[:6]}, ValueError, "batch: expected a tensor of 6 rows, as len"),
        ({"lengths": LENGTHS.float()}, TypeError, "lengths: expected a tensor of integers"),
        ({"lengths": [3, 4]}, TypeError, r"lengths: expected .* got \[3, 4\]"),
        ({"multiple": 0}, ValueError, "multiple: expected an int of at least 1, got 0"),
        ({"batch": {"x": torch.rand(7)}}, ValueError, "one number of columns, got none"),
        (
            {"batch": {"x": torch.rand(7, 30), "y": torch.rand(7, 8)}},
            ValueError,
            r"one number of columns, got batch\['x'\] with 30, batch\['y'\] with 8",
        ),
        ({"batch": [b"raw", range(7)]}, ValueError, r"batch\[1\]: .* of 7 rows, .*got range"),
    ],
)
def test_wrong_arguments(change, error, message):
    arguments = {"batch": torch.zeros(ROWS, COLUMNS), "lengths": LENGTHS, **change}
    with pytest.raises(error, match=message):
        SortedByLength(**arguments)


def test_padding_on_the_left_is_refused():
    """A row's tokens would be cut, and its padding kept."""
    left = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1], [1, 1, 0, 0]])
    message = r"batch\['attention_mask'\]: expected padding on the right"
    with pytest.raises(ValueError, match=message):
        SortedByLength({"input_ids": left, "attention_mask": left}, left.sum(1))
    right = left.sort(descending=True).values
    SortedByLength({"input_ids": right, "attention_mask": right}, right.sum(1))
    # A text without a token, a text that is not cut, and a mask that masks nothing.
    empty = torch.tensor([[0, 0, 0, 0], [0, 0, 1, 1], [1, 1, 1, 1]])
    SortedByLength({"attention_mask": empty.bool()}, torch.tensor([1, 4, 2]))


def test_sorted_outputs_must_be_named():
    model, (images, tokens) = made(), batches()
    step = GradientCache(model, ClipLoss(), 3)
    with pytest.raises(ValueError, match="the model takes 2, so a SortedByLength must name its"):
        step(images, SortedByLength(tokens, LENGTHS))
    for wrong in ("logit_scale", "text"):
        texts = SortedByLength(tokens, LENGTHS, outputs=wrong)
        message = f"'{wrong}' of a SortedByLength is not a per-sample output of the model"
        with pytest.raises(ValueError, match=message):
            GradientCache(model, ClipLoss(), 100)(images, texts)
        with pytest.raises(ValueError, match=r"'text_features' .*SortedByLength names those"):
            step(images, texts)
    both = SortedByLength(tokens, LENGTHS, outputs=["text_features", "image_features"])
    with pytest.raises(ValueError, match=r"'image_features' .*SortedByLength names those"):
        step(images, both)
    partial = functools.partial(model, images)  # one batch: all of its outputs
    with pytest.raises(ValueError, match="has shape"):
        GradientCache(partial, ClipLoss(), 3)(SortedByLength(tokens, LENGTHS))


def runs_of(columns):
    return [(width, len([*group])) for width, group in itertools.groupby(columns)]


def most_tokens(columns, parts):
    return max((part.stop - part.start) * columns[part.start] for part in parts)


@st.composite
def sequences(draw):
    """Columns of each row, the most first, and a number of micro-batches."""
    columns = draw(st.lists(st.integers(1, 12), min_size=1, max_size=9))
    return sorted(columns, reverse=True), draw(st.integers(1, len(columns)))


@given(sequences())
def test_the_largest_micro_batch_is_as_small_as_possible(drawn):
    columns, count = drawn
    parts = equal_tokens(runs_of(columns), count)
    assert len(parts) == count
    assert [row for part in parts for row in range(part.start, part.stop)] == [*range(len(columns))]
    assert all(part.start < part.stop for part in parts)
    ways = (
        [slice(a, b) for a, b in itertools.pairwise((0, *cuts, len(columns)))]
        for cuts in itertools.combinations(range(1, len(columns)), count - 1)
    )
    fewest = min(most_tokens(columns, way) for way in ways)
    assert most_tokens(columns, parts) == fewest == fewest_tokens(runs_of(columns), count)


@given(sequences(), st.integers(0, 5))
def test_a_longer_row_never_makes_micro_batches_smaller(drawn, more):
    columns, count = drawn
    longest = columns[0] + more
    expected = fewest_tokens(runs_of([longest, *columns[1:]]), count)
    found = growth(runs_of(columns), longest, count)
    assert found == expected / fewest_tokens(runs_of(columns), count) >= 1


def test_many_rows():
    runs = [(80, 1000), (24, 10**9), (8, 10**9)]
    parts = equal_tokens(runs, 1000)
    ends = [part.stop for part in parts]
    assert [part.start for part in parts] == [0, *ends[:-1]]
    assert ends[-1] == sum(n for _, n in runs)
    assert fewest_tokens(runs, 1000) == pytest.approx(32e9 / 1000, rel=0.01)
    found = equal_token_runs(runs, 10**9)  # in no time, as few differ
    assert len(found) < 10
    assert sum(number for *_, number in found) == 10**9
    assert sum(rows * number for rows, _, number in found) == ends[-1]


def test_one_length_gives_equal_rows():
    assert equal_tokens([(16, 10)], 3) == equal_rows(10, 4)
    assert [part.stop for part in equal_rows(10, 4)] == [4, 8, 10]


def test_no_rows():
    assert equal_rows(0, 3) == equal_tokens([], 0) == []
    assert growth([], 77, 0) == 1
    assert MicroBatch(slice(7, 7)).idle
    assert not MicroBatch(slice(6, 7)).idle
    assert MicroBatch(slice(0, 2), {"texts": slice(0, 1)}).of("texts") == slice(0, 1)
    assert MicroBatch(slice(0, 2), {"texts": slice(0, 1)}).of("images") == slice(0, 2)
