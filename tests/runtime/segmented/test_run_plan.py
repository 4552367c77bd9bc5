"""Which places run together: everything once and in order, nothing beyond a buffer's end, in as few runs as can be."""

import numpy as np
import pytest

from tide_export.bundle.engine_fields import NetworksInfo
from tide_export.runtime.segmented.run_plan import Run, padded, runs_over

INFO = NetworksInfo("fp32", 100, 40, max_tokens=32, max_logits=8, exit_size=16, max_batch_size=6, max_slot_tokens=5)


@pytest.mark.parametrize(
    ("count", "length", "tokens"),
    [(1, 0, 1), (2, 0, 2), (3, 0, 4), (17, 5, 32), (33, 0, 33), (48, 0, 48), (3, 97, 3), (3, 96, 4), (1, 99, 1)],
)
def test_runs_are_padded_to_a_power_of_two_that_fits(count: int, length: int, tokens: int) -> None:
    assert padded(count, length, max_tokens=48, capacity=100) == tokens
    assert padded(count, length, max_tokens=tokens, capacity=100) == tokens


@pytest.mark.parametrize(
    ("counts", "lengths", "runs"),
    [
        ({0: 1, 1: 1, 2: 1}, [7] * 6, [Run((0, 1, 2), 1)]),
        ({2: 1}, [7] * 6, [Run((2,), 1)]),
        ({1: 1, 4: 3}, [7] * 6, [Run((1, 4), 4)]),  # those in between are padding
        ({1: 5, 4: 3}, [7] * 6, [Run((1, 4), 5)]),  # no more than a row may take
        ({0: 1, 3: 30, 4: 3}, [7] * 6, [Run((0, 4), 4), Run((3,), 32)]),  # the prompt last
        ({0: 1, 1: 1, 2: 4}, [7, 99, 7, 0, 0, 0], [Run((0, 1), 1), Run((2,), 4)]),  # no room for padding at place 1
        ({0: 4, 1: 1, 2: 4}, [7, 99, 7, 0, 0, 0], [Run((0,), 4), Run((1,), 1), Run((2,), 4)]),
        ({0: 4, 2: 4}, [7, 100, 7, 0, 0, 0], [Run((0,), 4), Run((2,), 4)]),  # nor for one that is idle
        ({0: 3, 1: 3}, [7, 97, 7, 0, 0, 0], [Run((0, 1), 3)]),  # not a power of two, but together
        ({0: 4, 1: 1}, [7, 7, 99, 0, 0, 0], [Run((0, 1), 4)]),  # a full slot after them does not count
        ({3: 30}, [7, 7, 7, 70, 0, 0], [Run((3,), 30)]),  # it ends with the buffer
    ],
)
def test_neighbours_go_together_where_there_is_room(counts, lengths, runs) -> None:
    assert runs_over(counts, lengths, INFO) == runs


def test_everything_is_run_once_and_nothing_beyond_the_end() -> None:
    random = np.random.default_rng(0)
    for _ in range(2000):
        lengths = [int(n) for n in random.choice([0, 3, 60, 94, 97, 99, 100], 6)]
        counts = {}
        for place in range(6):
            room = 100 - lengths[place]
            if room and random.random() < 0.6:
                counts[place] = int(random.integers(1, min(room, 3 if random.random() < 0.7 else 32) + 1))
        done = []
        written = list(lengths)  # what must not be written over any more
        for run in runs_over(counts, lengths, INFO):
            assert run.tokens * run.slots <= INFO.max_tokens
            assert run.slots == 1 or run.tokens <= INFO.max_slot_tokens
            for place in range(run.start, run.stop):
                assert lengths[place] + run.tokens <= INFO.capacity
                assert lengths[place] >= written[place]
            for place in run.active:
                assert run.tokens >= counts[place]
                done.append(place)
                written[place] += counts[place]
        assert sorted(done) == sorted(counts)
