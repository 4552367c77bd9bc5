"""What one step can cost, whatever the text: prompts searched so that all tokens exit, none does, or the longest
catch-up comes, and the bound of docs/architecture/lazy-depth.md on each step."""

from collections.abc import Callable

import numpy as np
import pytest
from tiny_model import TinyModel

from tide_export.runtime.decoding.decoder import run_block
from tide_export.runtime.decoding.lossless import DraftLimits, LosslessDecoder
from tide_export.runtime.decoding.sampling import Sampler
from tide_export.runtime.engine import Engine
from tide_export.runtime.sequence import NO_LIMIT, SingleSequence

LAYERS = np.array([2, 2, 2])  # of each segment
STEPS = 40


@pytest.fixture(scope="module")
def thresholds(tiny: TinyModel) -> list[float]:
    """That some of the scores on random text exceed: half at the first checkpoint, few at the second."""
    ids = np.random.default_rng(0).integers(0, 48, 200).tolist()
    scores = tiny.reference(ids, [2.0, 2.0])[2]
    return [float(np.quantile(scores[:, 0], 0.5)), float(np.quantile(scores[:, 1], 0.95))]


def searched(tiny: TinyModel, thresholds: list[float], exits: Callable[[int], bool]) -> list[int]:
    """A text of which token `number` exits at the first checkpoint if `exits(number)`, else runs every layer."""
    random, text = np.random.default_rng(1), list[int]()
    for number in range(STEPS):
        wanted = 2 if exits(number) else 6
        candidates = ([*text, token] for token in random.permutation(48).tolist())
        text = next(ids for ids in candidates if tiny.reference(ids, thresholds)[1][-1] == wanted)
    return text


def tokens_computed(sequence: SingleSequence, *step) -> np.ndarray:
    """Tokens that each segment computes in a step."""
    before = np.array(sequence.computed)
    sequence.step(*step)
    return np.array(sequence.computed) - before


def bound(new: int, max_pending: int) -> int:
    """Tokens times layers of a step over `new` tokens."""
    return int(new * LAYERS[0] + (max_pending + new) * LAYERS[1:].sum())


@pytest.mark.parametrize("max_pending", [0, 1, 4, 16])
def test_the_longest_step_and_how_often_it_comes(
    tiny: TinyModel, tiny_engine: Engine, thresholds: list[float], max_pending: int
) -> None:
    every = max_pending + 1
    for exits, bursts in (
        (lambda number: True, STEPS // every),
        (lambda number: False, STEPS if max_pending == 0 else 0),
        (lambda number: number % every != max_pending, STEPS // every),  # exits for as long as they may be pending
    ):
        sequence = tiny_engine.start(thresholds, max_pending)
        text = searched(tiny, thresholds, exits)
        costs = [int(tokens_computed(sequence, [token]) @ LAYERS) for token in text]
        assert max(costs) <= bound(1, max_pending)
        assert costs.count(bound(1, max_pending)) == bursts
        assert sum(costs) <= STEPS * LAYERS.sum(), "catching up computes nothing twice"


@pytest.mark.parametrize("max_pending", [0, 3])
def test_steps_of_several_tokens(tiny: TinyModel, tiny_engine: Engine, max_pending: int) -> None:
    sequence, random = tiny_engine.start([0.0, 0.0], max_pending), np.random.default_rng(2)
    steps = [random.integers(0, 48, new).tolist() for new in random.integers(1, 8, 30)]
    shares = [int(tokens_computed(sequence, ids) @ LAYERS) / bound(len(ids), max_pending) for ids in steps]
    assert max(shares) == 1.0


@pytest.mark.parametrize(("max_drafts", "prompt_lookup"), [(0, 0), (1, 0), (4, 0), (4, 5), (16, 8)])
def test_a_verifying_run(tiny_engine: Engine, max_drafts: int, prompt_lookup: int) -> None:
    """Over the last token and all drafts: every token exits, and the text repeats itself, so that there are as many as
    there may be."""
    sequence = tiny_engine.start([0.0, 0.0], NO_LIMIT)
    decoder = LosslessDecoder(
        sequence, Sampler(), (2, 4, 6), DraftLimits(max_drafts, prompt_lookup, (0.0,) * 2, (0.0,) * 5), frozenset(), 256
    )
    ids, most = [5, 6, 7] * 3, 0

    def step(*arguments):
        nonlocal most
        before = sequence.computed[-1]
        result = sequence.step(*arguments)
        if before:  # after the prompt
            most = max(most, sequence.computed[-1] - before)
        return result

    for _ in range(12):
        ids = [token.id for token in run_block(decoder.block(ids, 100), step)][-1:]
    assert most <= max_drafts + prompt_lookup + 1
    assert most == max_drafts + 1 or prompt_lookup
