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
