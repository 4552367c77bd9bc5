"""Lossless mode for a list of prompts: the full model's tokens, whoever else drafts, verifies, is rewound meanwhile."""

from pathlib import Path

import numpy as np
import pytest

from tide_export.bundle.manifest import DEFAULT_VERIFY_COSTS, Drafting
from tide_export.runtime.engine import Engine, load
from tide_export.runtime.generation import Generation
from tide_export.runtime.scheduler import SchedulerLimits
from tide_export.runtime.stepping import NO_LIMIT
from tide_export.thresholds.resolve import MAX_THRESHOLD, NEVER_EXIT

LENGTHS = (1, 37, 90, 2, 18, 60)
NEW_TOKENS = 24
ALWAYS = 0.0


@pytest.fixture(scope="module")
def engine(demo_bundle: Path) -> Engine:
    return load(demo_bundle, threads=1)


@pytest.fixture(scope="module")
def prompts(demo_text_ids: list[int]) -> list[list[int]]:
    return [demo_text_ids[150 * number : 150 * number + length] for number, length in enumerate(LENGTHS)]


@pytest.fixture(scope="module")
def full(engine: Engine, prompts: list[list[int]]) -> list[list[int]]:
    return [
        engine.generate(prompt, max_new_tokens=NEW_TOKENS, mode="full", stop_token_ids=[]).tokens for prompt in prompts
    ]


@pytest.fixture(scope="module")
def mixed(engine: Engine, demo_text_ids: list[int]) -> list[float]:
    """Thresholds that about two thirds of what reaches each checkpoint pass: too many for all of them to be right."""
    state = engine.start([MAX_THRESHOLD] * len(engine.manifest.checkpoints))
    scores = np.array([state.step([token]).scores.copy() for token in demo_text_ids[600:700]])
    return np.clip(np.quantile(scores, 0.33, axis=0), 0.0, 1.0).tolist()


def tokens_of(generations: list[Generation]) -> list[list[int]]:
    return [one.tokens for one in generations]


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_who_comes_along_is_verified_at_once(
    engine: Engine, prompts: list[list[int]], full: list[list[int]], share: float
) -> None:
    """One sequence asks for full depth while the other, which has a draft waiting, would make the next."""
    batch = engine.start_batch(share, 4)
    one, other = (batch.join([ALWAYS] * 3, NO_LIMIT) for _ in range(2))
    first = batch.step({one: prompts[1], other: prompts[2]}, {one: 1, other: 1}, [one, other])
    known = {place: int(result.logits.argmax()) for place, result in first.items()}
    assert known == {one: full[1][0], other: full[2][0]}
    drafted = batch.step({other: [known[other]]}, {other: 1})[other]
    assert (drafted.exit_layer, drafted.segments_run, len(drafted.position_logits)) == (3, 1, 1)
    draft = [int(drafted.logits.argmax())]
    result = batch.step({one: [known[one]], other: draft}, {one: 1, other: 2}, [one])
    assert result[one].exit_layer == 12
    assert result[one].position_logits.argmax(-1).tolist() == [full[1][1]]
    own = result[other]
    if share == 1.0:
        assert (own.exit_layer, own.segments_run, len(own.position_logits)) == (3, 1, 1)
        own = batch.step({other: [5]}, {other: 3}, [other])[other]  # its own decision: all that waits
        assert own.exit_layer == 12
        assert len(own.position_logits) == 3
    else:
        assert (own.exit_layer, own.segments_run, len(own.position_logits)) == (12, 4, 2)
    assert int(own.position_logits[0].argmax()) == full[2][1]
    alone = engine.start([NEVER_EXIT] * 3)
    rows = alone.step([*prompts[2], known[other], *draft], logits_to_keep=2).position_logits
    np.testing.assert_allclose(own.position_logits[:2], rows, atol=1e-4)
    # And back again: what the buffers hold beyond is written over.
    batch.sequences[other].rewind(len(prompts[2]) + 1)
    again = batch.step({other: full[2][1:4]}, {other: 3}, [other])[other]
    assert again.position_logits.argmax(-1).tolist() == full[2][2:5]


def test_no_more_logits_come_than_a_sequence_had_tokens(engine: Engine, prompts: list[list[int]]) -> None:
    """Asked for more, it must not be given its neighbour's."""
    batch = engine.start_batch(1.0, 4)
    one, other = (batch.join([NEVER_EXIT] * 3, NO_LIMIT) for _ in range(2))
    result = batch.step({one: prompts[1], other: prompts[3]}, {one: 1, other: 9}, [one, other])
    assert len(prompts[3]) == 2
    expected = engine.start([NEVER_EXIT] * 3).step(prompts[3], logits_to_keep=9).position_logits
    np.testing.assert_allclose(result[other].position_logits, expected, atol=1e-4)
    assert len(result[one].position_logits) == 1


def test_more_prompts_than_places(
    engine: Engine, prompts: list[list[int]], full: list[list[int]], mixed: list[float]
) -> None:
    """A prompt takes the place of a sequence that ended while the others draft and verify; its rewinds are its own."""
    options = {"max_new_tokens": NEW_TOKENS, "mode": "lossless", "threshold": mixed, "stop_token_ids": []}
    scheduler = engine.scheduler(SchedulerLimits(slots=2))
    handles = [scheduler.submit(prompt, **options) for prompt in prompts + prompts[::-1]]
    assert tokens_of([handle.result() for handle in handles]) == full + full[::-1]


def test_the_bundle_s_drafting_is_used(engine: Engine, prompts: list[list[int]], full: list[list[int]]) -> None:
    never = engine.drafting_as(Drafting((1.0,) * 3, 0, 0, (0.5,) * 3, DEFAULT_VERIFY_COSTS, {}))
    found = never.generate(prompts[:2], max_new_tokens=NEW_TOKENS, mode="lossless", stop_token_ids=[])
    assert tokens_of(found) == full[:2]
    assert not any(one.stats.drafted for one in found)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_exits_that_cost_little_draft_much_and_change_nothing(
    engine: Engine, prompts: list[list[int]], temperature: float
) -> None:
    """Sampled drafts have the noise of the token that they guess, in a list as alone, where the scores are known."""
    count, seeds = len(engine.manifest.checkpoints), list(range(len(prompts)))
    cheap = engine.drafting_as(Drafting((ALWAYS,) * count, 6, 0, (0.05,) * count, (0.01,) * 5))
    given = {"max_new_tokens": NEW_TOKENS, "temperature": temperature, "stop_token_ids": []}
    expected = [
        engine.generate(p, mode="full", seed=seed, **given).tokens for p, seed in zip(prompts, seeds, strict=True)
    ]
    together = cheap.generate(prompts, mode="lossless", seed=seeds, **given)
    alone = [cheap.generate(p, mode="lossless", seed=seed, **given) for p, seed in zip(prompts, seeds, strict=True)]
    for made in (together, alone):
        assert tokens_of(made) == expected
        drafted, accepted = (sum(one.stats.drafts["exit"][n] for one in made) for n in range(2))
        assert drafted > 60
        assert accepted > drafted / 4
