"""The plan keeps a uniform sample, has each token run once, and is a function of text and settings alone."""

import dataclasses

import numpy as np
import pytest
import torch

from tide_export.calibration.sampling_plan import Plan
from tide_export.data.sequences import TokenSequence
from tide_export.errors import CalibrationError


def text(*lengths, seed=0):
    rng = np.random.default_rng(seed)
    return [TokenSequence(d // 2, rng.integers(0, 1000, n).astype(np.int32)) for d, n in enumerate(lengths)]


def make(sequences, capacity=10_000, seed=0, rows=4, tokens=None):
    return Plan.make(sequences, capacity, seed, rows, tokens)


def test_below_capacity_every_token_is_kept_and_run_once():
    sequences = text(5, 12, 1, 7, 0, 9)
    plan = make(sequences)
    assert plan.kept == plan.seen == 34
    expected = [(n, position) for n, sequence in enumerate(sequences) for position in range(len(sequence.ids))]
    assert [tuple(place) for place in plan.locations] == expected
    assert sorted(np.concatenate(plan.batches).tolist()) == [0, 1, 2, 3, 5]
    assert plan.tokens.sum() == 34


def test_batches_carry_the_kept_tokens_to_their_slots():
    """Reading each batch's token at (row, position) into its slot gives the tokens at `locations`, all of them once."""
    sequences = text(*np.random.default_rng(1).integers(1, 40, 300).tolist())
    for capacity in (10_000, 500):
        plan = make(sequences, capacity)
        found = np.full(plan.kept, -1)
        for number in range(len(plan.batches)):
            batch = plan.batch(number)
            assert batch.ids.dtype == batch.mask.dtype == torch.int64
            assert bool(batch.mask[batch.rows, batch.positions].all())
            assert (found[batch.slots] == -1).all()
            found[batch.slots] = batch.ids[batch.rows, batch.positions]
            assert int(batch.mask.sum()) == plan.tokens[number]
            assert bool((batch.mask.diff(dim=1) <= 0).all())  # padded on the right
            for row, member in enumerate(plan.batches[number]):
                length = int(batch.mask[row].sum())
                assert batch.ids[row, :length].tolist() == sequences[member].ids[:length].tolist()
        assert found.tolist() == [sequences[n].ids[position] for n, position in plan.locations]


def test_what_follows_and_where_it_is_from():
    sequences = text(3, 2, 4)
    plan = make(sequences)
    ids = [sequence.ids.tolist() for sequence in sequences]
    assert plan.next_ids.tolist() == [*ids[0][1:], -1, *ids[1][1:], -1, *ids[2][1:], -1]
    assert plan.documents.tolist() == [0] * 5 + [1] * 4
    assert plan.next_ids.dtype == plan.documents.dtype == plan.locations.dtype == np.int64


def test_a_sequence_is_run_as_far_as_its_last_kept_token():
    sequences = text(*[100] * 50)
    plan = make(sequences, capacity=20)
    needed = {n: max(p for m, p in plan.locations.tolist() if m == n) + 1 for n in plan.locations[:, 0].tolist()}
    assert sorted(np.concatenate(plan.batches).tolist()) == sorted(needed)
    assert plan.tokens.sum() == sum(needed.values()) < 2000
    assert plan.seen == 5000


def test_uniform_over_the_text():
    """Each tenth of the text gets its tenth of the slots (to 4 standard deviations)."""
    sequences = text(*[7, 13, 50, 30] * 10)
    starts = np.cumsum([0, *(len(sequence.ids) for sequence in sequences)])
    counts = np.zeros(10)
    for seed in range(200):
        places = make(sequences, capacity=50, seed=seed).locations
        assert len({tuple(place) for place in places}) == 50
        counts += np.bincount((starts[places[:, 0]] + places[:, 1]) // 100, minlength=10)
    expected = 200 * 50 / 10
    assert np.abs(counts - expected).max() < 4 * np.sqrt(expected * 0.9)


@pytest.mark.parametrize(("rows", "tokens"), [(4, None), (8, 64), (1, 10), (8, 5)])
def test_batches_are_bounded_and_hardly_padded(rows, tokens):
    sequences = text(*np.random.default_rng(2).integers(1, 33, 400).tolist())
    plan = make(sequences, rows=rows, tokens=tokens)
    area = 0
    for number, members in enumerate(plan.batches):
        shape = plan.batch(number).ids.shape
        assert len(members) <= rows
        assert tokens is None or len(members) == 1 or shape.numel() <= tokens
        area += shape.numel()
    assert area < 1.15 * plan.seen


def test_hash_names_text_sample_and_batches():
    sequences = text(9, 30, 4, 11)
    plan = make(sequences, capacity=20)
    assert make(sequences, capacity=20).sha256 == plan.sha256
    changed = [dataclasses.replace(sequences[0], ids=sequences[0].ids[::-1]), *sequences[1:]]
    moved = [dataclasses.replace(sequences[0], document=7), *sequences[1:]]
    others = [
        make(changed, capacity=20),
        make(moved, capacity=20),
        make(sequences[::-1], capacity=20),
        make(sequences, capacity=21),
        make(sequences, capacity=20, seed=1),
        make(sequences, capacity=20, rows=3),
        make(sequences, capacity=20, tokens=32),
    ]
    assert len({plan.sha256, *(other.sha256 for other in others)}) == 8


@pytest.mark.parametrize("lengths", [(), (0,), (0, 0)])
def test_text_without_a_token(lengths):
    with pytest.raises(CalibrationError, match="no usable token"):
        make(text(*lengths))
