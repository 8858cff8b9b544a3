"""Sequences sorted by length and cut give the loss and gradients of the padded batch."""

import functools
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from megabatch import SortedByLength
from megabatch.gradient_cache import GradientCache
from megabatch.gradient_cache.by_length import (
    equal_rows,
    equal_token_runs,
    equal_tokens,
    fewest_micro_batches,
    fewest_tokens,
    full_micro_batches,
    growth,
)
from megabatch.losses import ClipLoss
from tests.gradient_cache import parallel
from tests.gradient_cache.towers import assert_same
from tests.similarity.distributed.processes import World, on_processes

ROWS, COLUMNS, WORDS = 7, 30, 9
LENGTHS = torch.tensor([3, 30, 9, 1, 17, 9, 8])


class Texts(nn.Module):
    """The mean over tokens without padding, which is token 0."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, 6)
        self.positions = nn.Parameter(torch.randn(COLUMNS, 6))
        self.linear = nn.Linear(6, 4)
        self.seen = []

    def forward(self, tokens):
        self.seen.append(tuple(tokens.shape))
        x = (self.words(tokens) + self.positions[: tokens.shape[1]]).tanh()
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


def made(kind=Pair):
    torch.manual_seed(0)
    return kind().double()


def batches(lengths=LENGTHS):
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(len(lengths), 5, generator=generator, dtype=torch.float64)
    tokens = torch.randint(1, WORDS, (len(lengths), COLUMNS), generator=generator)
    return images, tokens * (torch.arange(COLUMNS) < lengths[:, None])


@pytest.mark.parametrize("device", [None, "cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("size", "kept"), [(2, 0), (2, 2), (2, 4), (100, 0)])
def test_a_model_of_all_batches(device, size, kept):
    """Its other batches keep equal rows."""
    (images, tokens), model = batches(), made().to(device)
    texts = SortedByLength(tokens, LENGTHS, outputs="text_features")
    options = {"device": device, "kept_micro_batches": kept, "gradients_on_host": kept == 2}
    step = GradientCache(model, ClipLoss(), size, input_names=["images", "texts"], **options)
    named, rows = {"images": images, "texts": texts}, []
    model.image.register_forward_pre_hook(lambda _, args: rows.append(len(args[0])))

    def plain():
        return ClipLoss()(**model(images.to(device), tokens.to(device)))

    assert_same(lambda: step(**named), plain, model, tolerance=1e-12)
    if size == 2:
        shapes = [(1, 30), (1, 24), (2, 16), (3, 8)]
        assert model.text.seen[1:] == shapes + shapes[: 4 - kept]
        assert rows[1:] == ([2, 2, 2, 1] * 2)[: 8 - kept]
    with torch.no_grad():
        torch.testing.assert_close(step(**named), plain(), rtol=0, atol=1e-12)


def test_micro_batches_have_equal_tokens_and_are_cut_to_their_longest_row():
    tower, (_, tokens) = made(Texts), batches()
    step = GradientCache((tower,), torch.Tensor.std, 2)
    sort = functools.partial(SortedByLength, tokens, LENGTHS)
    assert_same(lambda: step(sort()), lambda: tower(tokens).std(), tower, tolerance=1e-12)
    assert tower.seen[1:] == [(1, 30), (1, 24), (2, 16), (3, 8)] * 2  # lengths 30, 17, 9 9, 8 3 1
    tower.seen.clear()
    with torch.no_grad():
        step(sort(multiple=1))
    assert tower.seen == [(1, 30), (1, 17), (3, 9), (2, 3)]
    loss = step(sort())
    tokens[0, 0] = 1
    with pytest.raises(RuntimeError, match="batch 0 of encoder 0 was changed in place"):
        loss.backward()


def test_nested_batches_are_cut_and_sorted_together():
    """With lists that have an item for each row; a tensor that requires a gradient gets it."""
    tower, (_, tokens) = made(Texts), batches()
    more = nn.Parameter(torch.rand(ROWS, COLUMNS, 2))
    names = [f"{length} tokens" for length in LENGTHS]
    batch = {"ids": tokens, "length": LENGTHS, "more": [more], "flag": "kept", "names": names}

    def encode(batch):
        ids, (extra,) = batch["ids"], batch["more"]
        assert batch["flag"] == "kept"
        assert ids.shape == extra.shape[:2]
        assert batch["names"] == [f"{n} tokens" for n in (ids != 0).sum(1).tolist()]
        return tower(ids) * batch["length"][:, None] + extra[:, 0, :1]

    step, sort = GradientCache((encode,), torch.Tensor.std, 2), SortedByLength(batch, LENGTHS)
    assert_same(lambda: step(sort), lambda: encode(batch).std(), tower, nn.ParameterList([more]))


@on_processes(2)
def test_several_processes(world: World) -> None:
    """Shards of different lengths and sizes, one of them empty, under DDP and FSDP2."""
    for sizes in ([6, 1], [0, 7]):
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
    for size, outputs, message in (
        (3, (), "the model takes 2, so a SortedByLength must name its"),
        (100, "logit_scale", "'logit_scale' of a SortedByLength is not a per-sample output of the"),
        (100, "text", "'text' of a SortedByLength is not a per-sample output of the model"),
        (3, "text", r"'text_features' .*SortedByLength names those"),
        (3, ["text_features", "image_features"], r"'image_features' .*SortedByLength names those"),
    ):
        texts = SortedByLength(tokens, LENGTHS, outputs=outputs)
        with pytest.raises(ValueError, match=message):
            GradientCache(model, ClipLoss(), size)(images, texts)
    partial = functools.partial(model, images)  # one batch: all of its outputs
    with pytest.raises(ValueError, match="has shape"):
        GradientCache(partial, ClipLoss(), 3)(SortedByLength(tokens, LENGTHS))


def runs_of(columns):
    return [(width, len([*group])) for width, group in itertools.groupby(columns)]


def most_tokens(columns, parts):
    return max((part.stop - part.start) * columns[part.start] for part in parts)


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_the_largest_micro_batch_is_as_small_as_possible(rows):
    """And a longer row never makes it smaller."""
    all_columns = itertools.combinations_with_replacement(range(7, 0, -1), rows)
    for columns, count in itertools.product(all_columns, range(1, rows + 1)):
        parts = equal_tokens(runs_of(columns), count)
        assert len(parts) == count
        assert [row for part in parts for row in range(part.start, part.stop)] == [*range(rows)]
        assert all(part.start < part.stop for part in parts)
        ways = (
            [slice(a, b) for a, b in itertools.pairwise((0, *cuts, rows))]
            for cuts in itertools.combinations(range(1, rows), count - 1)
        )
        fewest = min(most_tokens(columns, way) for way in ways)
        assert most_tokens(columns, parts) == fewest == fewest_tokens(runs_of(columns), count)
        longer = fewest_tokens(runs_of([9, *columns[1:]]), count)
        assert growth(runs_of(columns), 9, count) == longer / fewest >= 1


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_full_micro_batches_are_few_and_have_rows_by_their_columns(rows):
    for columns in itertools.combinations_with_replacement(range(7, 0, -1), rows):
        for limit in range(1, 16):
            parts = full_micro_batches(runs_of(columns), limit)
            assert len(parts) == fewest_micro_batches(runs_of(columns), limit)
            assert [row for part in parts for row in range(part.start, part.stop)] == [*range(rows)]
            sizes = [max(1, limit // columns[part.start]) for part in parts]
            assert [part.stop - part.start for part in parts[:-1]] == sizes[:-1]
            assert 1 <= parts[-1].stop - parts[-1].start <= sizes[-1]
    assert full_micro_batches([], 4) == []


def test_many_rows():
    """In no time, as few micro-batches differ."""
    runs = [(80, 1000), (24, 10**9), (8, 10**9)]
    assert fewest_tokens(runs, 1000) == pytest.approx(32e9 / 1000, rel=0.01)
    found = equal_token_runs(runs, 10**9)
    assert len(found) < 10
    assert sum(number for *_, number in found) == 10**9
    assert sum(rows * number for rows, _, number in found) == 2 * 10**9 + 1000


def test_rows_of_one_length_and_no_rows():
    assert equal_tokens([(16, 10)], 3) == equal_rows(10, 4)
    assert [part.stop for part in equal_rows(10, 4)] == [4, 8, 10]
    assert equal_rows(0, 3) == equal_tokens([], 0) == []
    assert growth([], 77, 0) == 1
