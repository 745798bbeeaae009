"""The order of the data: each row once an epoch, the same everywhere, and figures that pin it for
ever."""

import numpy as np
import pytest

from distflow.scheduling.data_plan import (
    EPOCHS,
    MINI_BATCHES,
    epoch_order,
    keyed_permutation,
    place,
    total_steps,
)


def test_the_order_is_pinned():
    """A change of these figures would make every checkpoint resume on other rows."""
    assert epoch_order(10, 1, 0, True).tolist() == [3, 5, 2, 9, 7, 0, 8, 6, 1, 4]
    assert epoch_order(10, 1, 1, True).tolist() == [9, 0, 2, 3, 6, 5, 1, 4, 7, 8]
    assert epoch_order(10, -1, 0, True).tolist() == [8, 9, 0, 7, 4, 2, 6, 3, 1, 5]


@pytest.mark.parametrize("num_rows", [1, 2, 7, 1000])
def test_an_epoch_serves_each_row_once(num_rows):
    for epoch in range(3):
        assert sorted(epoch_order(num_rows, 5, epoch, True)) == list(range(num_rows))
    assert epoch_order(num_rows, 5, 2, False).tolist() == list(range(num_rows))


def test_orders_differ_by_seed_epoch_and_purpose():
    orders = [
        tuple(epoch_order(100, seed, epoch, True)) for seed in (0, 1, 2) for epoch in (0, 1, 2)
    ]
    orders += [
        tuple(keyed_permutation(100, seed, MINI_BATCHES, word))
        for seed in (0, 1, 2)
        for word in (0, 1, 2)
    ]
    orders += [tuple(keyed_permutation(100, 0, EPOCHS, 0, word)) for word in (1, 2)]
    assert len(set(orders)) == len(orders)


def test_every_position_is_equally_likely():
    """Chi-squared over 10 positions, 20,000 draws: 9 degrees of freedom have 27.9 at p = 0.001."""
    first = np.array([keyed_permutation(10, seed, EPOCHS, 0)[0] for seed in range(20_000)])
    counts = np.bincount(first, minlength=10)
    assert ((counts - 2000) ** 2 / 2000).sum() < 27.9


def test_the_order_of_an_epoch_cannot_be_changed_by_its_readers():
    with pytest.raises(ValueError):
        epoch_order(10, 1, 0, True)[0] = 1


def test_places_walk_through_the_epochs():
    places = [place(number, 7, 3, True) for number in range(21)]
    assert [epoch for epoch, _ in places] == [0] * 7 + [1] * 7 + [2] * 7
    for epoch in range(3):
        assert [row for e, row in places if e == epoch] == epoch_order(7, 3, epoch, True).tolist()
    assert all(type(row) is int for _, row in places)


@pytest.mark.parametrize(
    ("epochs", "rows", "batch", "steps"),
    [(1, 8, 4, 2), (3, 10, 4, 8), (1, 3, 4, 1), (2, 5, 10, 1), (2, 6, 5, 3)],
)
def test_steps_cross_the_borders_of_epochs(epochs, rows, batch, steps):
    assert total_steps(epochs, rows, batch) == steps
