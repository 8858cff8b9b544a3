from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from megabatch.data.order import Order, Part

PARTS = st.lists(st.builds(Part, st.integers(1, 30), st.integers(1, 70)), min_size=1, max_size=4)


def samples(order: Order, epoch: int) -> np.ndarray:
    order.epoch = epoch
    return order.draws() % sum(part.size for part in order.parts)


def test_one_part_is_a_permutation_an_epoch_and_stays_what_it_was():
    order = Order([Part(6, 6)], seed=3)
    for epoch in range(3):
        expected = np.random.RandomState([3, epoch]).permutation(6)
        assert samples(order, epoch).tolist() == expected.tolist()


@given(parts=PARTS, epochs=st.integers(1, 6))
@settings(max_examples=60)
def test_every_sample_of_a_part_comes_as_often_as_any_other(parts, epochs):
    """After any number of epochs no sample is ahead of another of its part by more than one."""
    order = Order(parts, seed=1)
    seen: Counter[int] = Counter()
    for epoch in range(epochs):
        order.epoch = epoch
        draws = order.draws()
        assert draws.dtype == np.int64
        assert len(set(draws.tolist())) == len(draws) == order.pairs  # seeds of augmentation differ
        found = samples(order, epoch).tolist()
        seen.update(found)
        first = 0
        for part in parts:
            assert sum(first <= i < first + part.size for i in found) == part.drawn
            counts = [seen[i] for i in range(first, first + part.size)]
            assert max(counts) - min(counts) <= 1
            first += part.size


def test_parts_are_mixed_and_a_sample_comes_again_in_the_next_pass_only():
    order = Order([Part(3000, 3000), Part(1000, 3000)], seed=0)
    found = samples(order, 0)
    for piece in np.split(found >= 3000, 10):
        assert 0.4 < piece.mean() < 0.6
    passes = found[found >= 3000].reshape(3, 1000)
    for own in passes:
        assert sorted(own) == list(range(3000, 4000))
    assert passes[0].tolist() != passes[1].tolist()
    assert ((samples(order, 1) >= 3000) != (found >= 3000)).any()


@given(parts=PARTS, block=st.integers(2, 12), seed=st.integers(0, 9), in_turn=st.booleans())
@settings(max_examples=30)
def test_blocks_are_of_one_part_without_a_sample_twice_and_all_come_equally_often(
    parts, block, seed, in_turn
):
    """In proportion to the draws, or in turn; no sample of a part is ahead by more than two."""
    parts = [Part(part.size + block, part.drawn + block) for part in parts]
    if in_turn:
        parts = [Part(part.size, parts[0].drawn) for part in parts]
    order = Order(parts, seed, block=block, in_turn=in_turn)
    ends = np.cumsum([part.size for part in parts])
    seen: Counter[int] = Counter()
    for epoch in range(4):
        found = samples(order, epoch).reshape(-1, block)
        draws = order.draws().tolist()
        assert len(set(draws)) == len(draws) == order.pairs
        assert all(len(set(batch)) == block for batch in found.tolist())
        part_of = np.searchsorted(ends, found, side="right")
        assert (part_of == part_of[:, :1]).all()
        counts = np.bincount(part_of[:, 0], minlength=len(parts)).tolist()
        assert counts == [part.drawn // block for part in parts]
        if in_turn:
            assert part_of[:, 0].tolist() == [*range(len(parts))] * counts[0]
        seen.update(found.ravel().tolist())
        for part, end in zip(parts, ends.tolist(), strict=True):
            often = [seen[i] for i in range(end - part.size, end)]
            assert max(often) - min(often) <= 2


def test_the_order_of_sources_of_blocks_is_random_and_each_epoch_has_another():
    order = Order([Part(400, 400), Part(200, 200)], seed=0, block=4)
    epochs = [(samples(order, epoch)[::4] >= 400).tolist() for epoch in range(2)]
    assert epochs[0] != epochs[1]
    for half in (epochs[0][:75], epochs[0][75:]):
        assert 15 < sum(half) < 35
    assert order.parameters()["batches"] == "4 of a source"


@given(parts=PARTS, block=st.integers(2, 12), ranks=st.integers(1, 2), done=st.integers(0, 5))
@settings(max_examples=20)
def test_requests_of_all_ranks_from_any_position_are_the_rest_of_the_epoch(
    parts, block, ranks, done
):
    parts = [Part(part.size + block, part.drawn + block) for part in parts]
    order = Order(parts, 3, epoch=1, block=block)
    expected = order.draws()[done * block :].reshape(-1, block)
    shares = []
    for rank in range(ranks):
        rows = range(block * rank // ranks, block * (rank + 1) // ranks)
        again = Order(parts, 3, epoch=1, position=done * block, block=block)
        shares.append([request.draws for request in again.requests(block, rows, block)])
    found = [np.concatenate(of_ranks).tolist() for of_ranks in zip(*shares, strict=True)]
    assert found == expected.tolist()
