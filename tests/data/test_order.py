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
    order = Order([Part(6, 6)], seed=3, shuffle=True)
    for epoch in range(3):
        expected = np.random.RandomState([3, epoch]).permutation(6)
        assert samples(order, epoch).tolist() == expected.tolist()


@given(parts=PARTS, shuffle=st.booleans(), epochs=st.integers(1, 6))
@settings(max_examples=60)
def test_every_sample_of_a_part_comes_as_often_as_any_other(parts, shuffle, epochs):
    """After any number of epochs no sample is ahead of another of its part by more than one."""
    order = Order(parts, seed=1, shuffle=shuffle)
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


def test_half_of_a_part_is_the_other_half_in_the_next_epoch():
    order = Order([Part(4, 4), Part(10, 5)], seed=0, shuffle=True)
    first, second = samples(order, 0), samples(order, 1)
    assert sorted(first[first < 4]) == sorted(second[second < 4]) == [0, 1, 2, 3]
    assert sorted([*first[first >= 4], *second[second >= 4]]) == list(range(4, 14))


def test_parts_are_mixed_throughout_an_epoch():
    order = Order([Part(3000, 3000), Part(1000, 3000)], seed=0, shuffle=True)
    second = samples(order, 0) >= 3000
    for piece in np.split(second, 10):
        assert 0.4 < piece.mean() < 0.6
    assert (samples(order, 1) >= 3000).tolist() != second.tolist()


def test_a_sample_comes_again_in_the_next_pass_only():
    order = Order([Part(500, 500), Part(100, 300)], seed=0, shuffle=True)
    found = samples(order, 0)
    own = found[found >= 500].reshape(3, 100)
    for piece in own:
        assert sorted(piece) == list(range(500, 600))
    assert own[0].tolist() != own[1].tolist()


def test_without_shuffle_parts_follow_each_other():
    order = Order([Part(3, 2), Part(2, 4)], seed=0, shuffle=False)
    assert samples(order, 0).tolist() == [0, 1, 3, 4, 3, 4]
    assert samples(order, 1).tolist() == [2, 0, 3, 4, 3, 4]


def test_what_the_order_depends_on():
    assert Order([Part(3, 3)], 7, True).parameters() == {"pairs": 3, "seed": 7, "shuffle": True}
    mixed = Order([Part(3, 3), Part(2, 4)], 7, True).parameters()
    assert mixed == {"pairs": 7, "seed": 7, "shuffle": True, "parts": [[3, 3], [2, 4]]}
