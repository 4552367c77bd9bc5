"""The sample is bounded and uniform, and the vectorised form does what one draw per item does."""

import numpy as np

from tide_export.calibrate.reservoir import Reservoir


def fill(capacity, batches, seed):
    reservoir = Reservoir(capacity, np.random.default_rng(seed))
    slots = np.full(capacity, -1)
    for batch in batches:
        rows, places = reservoir.offer(batch)
        assert len(set(places.tolist())) == len(places)
        assert (np.diff(rows) > 0).all()
        slots[places] = reservoir.seen - batch + rows
    return reservoir, slots


def test_everything_is_kept_below_capacity():
    reservoir, slots = fill(100, [30, 0, 50], seed=0)
    assert reservoir.filled == reservoir.seen == 80
    assert slots[:80].tolist() == list(range(80))


def test_bounded_and_without_repeats():
    reservoir, slots = fill(64, [100] * 50, seed=0)
    assert reservoir.seen == 5000
    assert reservoir.filled == 64
    assert len(set(slots.tolist())) == 64
    assert slots.min() >= 0


def test_uniform_over_the_whole_stream():
    """Each tenth of the stream gets its tenth of the slots, whatever the batches (to 4 standard deviations)."""
    for batches in ([1000], [10] * 100, [500, 3, 497], [2] * 500):
        kept = np.concatenate([fill(50, batches, seed)[1] for seed in range(100)])
        counts = np.bincount(kept // 100, minlength=10)
        expected = len(kept) / 10
        assert np.abs(counts - expected).max() < 4 * np.sqrt(expected * 0.9)


def test_batches_equal_one_by_one():
    """Same draws, item by item in a plain loop."""
    capacity, batches = 20, [13, 40, 7, 90]
    _, slots = fill(capacity, batches, seed=3)
    rng, naive, number = np.random.default_rng(3), np.full(capacity, -1), 0
    for batch in batches:
        draws = rng.integers(0, np.arange(number, number + batch) + 1)
        for draw in draws:
            slot = number if number < capacity else draw
            if slot < capacity:
                naive[slot] = number
            number += 1
    assert slots.tolist() == naive.tolist()
