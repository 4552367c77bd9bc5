"""The replay of lossless mode against lossless mode itself, and what the runtime learns of exits on recorded texts."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tide_export.bundle.manifest import Drafting
from tide_export.runtime.engine import Engine
from tide_export.tuning.measure import Measurement, measure_prompts
from tide_export.tuning.replay import (
    Replayed,
    Setting,
    StepCosts,
    best_setting,
    replay,
    step_costs,
)

COSTS = StepCosts(draft=(1.0, 2.0), verify={1: 4.0, 5: 6.0}, block={1: 4.0, 5: 8.0}, plain=4.0)
NO_TEXT = [[0]]  # a prompt in which nothing matches


def recording(scores: list, right: list) -> Measurement:
    """One text of tokens 1, 2, 3 ...; scores [P, 2], whether drafts are right [P, 2]."""
    full = np.arange(1, len(scores) + 1)[None]
    early = np.where(right, full[0, :, None], -1)[None]
    return Measurement(np.array(scores, np.float32)[None], early, full, (2, 4), 6, np.zeros(early.shape))


def exits_alone(one: Measurement, thresholds: tuple[float, float], max_drafts: int) -> tuple[float, int, int]:
    replayed = replay(one, COSTS, NO_TEXT, Setting(thresholds, max_drafts, 0, 1.0))
    assert (replayed.lookup_drafted, replayed.lookup_accepted) == (0, 0)
    return replayed.seconds, replayed.drafted, replayed.accepted


def test_a_replay_by_hand() -> None:
    scores = [[0.0, 0.0], [0.9, 0.9], [0.1, 0.9], [0.9, 0.9], [0.1, 0.1]]
    one = recording(scores, [[1, 1], [1, 1], [1, 0], [0, 1], [1, 1]])
    # After the first token, which the prompt's step gives: a draft (1 second), after which another is not expected to
    # pay, as nothing is known of such a draft yet; verified over 2 (4.5 s): 2 tokens. One more, which is wrong (1 s and
    # 4.5 s): 1 token. The last token (4 s).
    assert exits_alone(one, (0.5, 0.5), 2) == ((1 + 4.5 + 1 + 4.5 + 4) / 4, 2, 1)
    assert exits_alone(one, (1.0, 1.0), 2) == (4.0, 0, 0)
    assert exits_alone(one, (0.5, 0.5), 0) == (4.0, 0, 0)


def test_a_replay_with_prompt_lookup_by_hand() -> None:
    nothing = np.empty((1, 4, 0))
    one = Measurement(nothing.astype(np.float32), nothing.astype(np.int64), np.array([[1, 2, 9, 4]]), (), 6, nothing)
    # 1 was given. After 7 1 came 2, which is right: 5 s for two tokens. Nothing is known of 9: 4 s.
    found = replay(one, COSTS, [[7, 1, 2, 3, 7]], Setting((), 0, 4, 1.0))
    assert found == Replayed((5 + 4) / 3, 0, 0, 1, 1)


def test_nothing_pays_when_every_draft_is_wrong() -> None:
    wrong = recording([[0.9, 0.9]] * 20, [[0, 0]] * 20)
    found = best_setting(wrong, COSTS, NO_TEXT)
    assert found.thresholds == (1.0, 1.0)
    assert (found.speedup, found.max_drafts, found.prompt_lookup) == (1.0, 0, 0)


def test_prompt_lookup_is_chosen_for_a_text_that_repeats_itself() -> None:
    wrong = recording([[0.9, 0.9]] * 24, [[0, 0]] * 24)
    circle = replace(wrong, full=np.array([[5, 6, 7] * 8]))
    found = best_setting(circle, COSTS, NO_TEXT)
    assert found.prompt_lookup > 0
    replayed = replay(circle, COSTS, NO_TEXT, found)
    without_exits = replay(circle, COSTS, NO_TEXT, replace(found, thresholds=(1.0, 1.0), max_drafts=0))
    assert without_exits.seconds < 1.15 * replayed.seconds
    assert found.speedup == COSTS.plain / replayed.seconds > 1.5
    assert replayed.lookup_accepted > 12


NOISY = StepCosts(draft=(0.3, 0.7), verify={1: 1.0, 13: 1.6}, block={1: 1.0, 13: 2.0}, plain=1.0)


def noisy(chance: Callable[[np.ndarray], np.ndarray]) -> Measurement:
    """Texts whose drafts are right with a chance that depends on the scores."""
    rng = np.random.default_rng(0)
    scores = rng.random((4, 200, 2)).astype(np.float32)
    right = rng.random(scores.shape) < chance(scores)
    full = np.broadcast_to(np.arange(1, 201), (4, 200))
    return Measurement(scores, np.where(right, full[..., None], -1), full, (2, 4), 6, 0 * scores)


def test_exits_are_chosen_as_well_as_any_thresholds_would() -> None:
    texts = noisy(lambda scores: scores**0.5)
    found = best_setting(texts, NOISY, NO_TEXT * 4)
    assert (found.prompt_lookup, found.thresholds) == (0, (0.0, 0.0))
    assert found.speedup == NOISY.plain / replay(texts, NOISY, NO_TEXT * 4, found).seconds
    thresholds = itertools.product(np.linspace(0, 1, 11), repeat=2)
    others = [replay(texts, NOISY, NO_TEXT * 4, replace(found, thresholds=given)).seconds for given in thresholds]
    assert found.speedup > 1.15
    assert found.speedup > NOISY.plain / min(others) - 0.04


@pytest.mark.parametrize("right", [0, 1])
def test_what_drafts_at_a_checkpoint_are_accepted_is_learned_whatever_the_scores(right: int) -> None:
    """Also where high scores are the wrong ones, and where one checkpoint is always wrong."""
    inverted = noisy(lambda scores: (1 - scores) ** 0.5)
    inverted.early[..., 1 - right] = -1
    costs = replace(NOISY, draft=(0.2, 0.3))
    always = noisy(lambda scores: 0 * scores)
    found = best_setting(inverted, costs, NO_TEXT * 4)
    assert found.speedup is not None
    assert found.speedup > 1.05
    assert best_setting(always, costs, NO_TEXT * 4).speedup == 1.0
    lost = replay(always, costs, NO_TEXT * 4, found).seconds
    assert lost < 1.02 * costs.plain, "what finding it out costs"


@pytest.fixture(scope="module")
def engine(demo_bundle) -> Engine:
    from tide_export.runtime.engine import load

    return load(demo_bundle, threads=1)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_replay_expects_the_acceptance_that_generating_has(engine: Engine, temperature: float) -> None:
    """Drafts after a wrong draft may differ; with one draft at a time the counts are equal."""
    rng = np.random.default_rng(1)
    count, length = len(engine.manifest.checkpoints), 24
    prompts = [rng.integers(5, 4000, 12).tolist() for _ in range(6)]
    options: dict[str, Any] = {"max_new_tokens": length, "temperature": temperature, "stop_token_ids": []}
    full = [engine.generate(p, mode="full", seed=seed, **options).tokens for seed, p in enumerate(prompts)]
    texts = [p + tokens[:-1] for p, tokens in zip(prompts, full, strict=True)]
    recorded = measure_prompts(engine, texts, 12, engine.manifest.checkpoints, temperature=temperature)
    assert (recorded.full == np.array(full)).all()
    thresholds = [float(value) for value in np.quantile(recorded.scores, 0.4, axis=(0, 1))]
    costs = StepCosts((0.1,) * count, {1: 1.0, 2: 1.0}, {1: 1.0}, 1.0)
    setting = Setting(tuple(thresholds), 1, 0, 1.0)
    given = replace(setting.drafting(), draft_costs=costs.draft_costs, verify_costs=costs.verify_costs)
    drafting = engine.drafting_as(given)
    drafted = accepted = 0
    for seed, p in enumerate(prompts):
        stats = drafting.generate(p, mode="lossless", seed=seed, **options).stats
        drafted, accepted = drafted + stats.drafted, accepted + stats.accepted
    expected = replay(recorded, costs, prompts, setting)
    assert 0 < expected.accepted < expected.drafted
    assert (drafted, accepted) == (expected.drafted, expected.accepted)


def test_the_replay_expects_the_lookups_that_generating_has(engine: Engine) -> None:
    off, length, prompts = [1.0] * len(engine.manifest.checkpoints), 60, [[50, 60, 70] * 3, [300, 301, 300, 302] * 2]
    full = [engine.generate(p, max_new_tokens=length, mode="full", stop_token_ids=[]).tokens for p in prompts]
    nothing = np.empty((2, length, 0))
    recorded = Measurement(nothing.astype(np.float32), nothing.astype(np.int64), np.array(full), (), 12, nothing)
    costs = StepCosts((), {1: 1.0, 9: 1.4}, {1: 1.0, 9: 1.4}, 1.0)
    expected = replay(recorded, costs, prompts, Setting((), 0, 8, 1.0))
    stats = [
        engine.drafting_as(Drafting(tuple(off), 0, 8, (0.5,) * len(off), costs.verify_costs, {})).generate(
            p, max_new_tokens=length, mode="lossless", stop_token_ids=[]
        )
        for p in prompts
    ]
    lookup_drafted, accepted = (
        sum(getattr(s.stats, name) for s in stats) for name in ("lookup_drafted", "lookup_accepted")
    )
    assert expected.lookup_accepted > 20
    assert (lookup_drafted, accepted) == (expected.lookup_drafted, expected.lookup_accepted)


def test_step_costs_are_those_of_the_steps(engine: Engine) -> None:
    costs = step_costs(engine, [5, 6, 7, 8], max_draft=4, rounds=5)
    assert len(costs.draft) == len(engine.manifest.checkpoints)
    assert list(costs.verify) == list(costs.block) == [1, 2, 3, 4, 5]
    assert min(costs.draft) < costs.plain  # a third of the layers against all of them


def test_seconds_of_a_run_over_pending_and_new_tokens() -> None:
    assert [COSTS.verifying(n) for n in (0, 2, 4, 9)] == [4.0, 5.0, 6.0, 6.0]
    assert [COSTS.verifying(0, n) for n in (1, 3, 5)] == [4.0, 6.0, 8.0]
    assert COSTS.verifying(2, 3) == 6.0 + 1.0


def test_costs_of_verifying_in_steps_of_full_depth() -> None:
    costs = StepCosts((), {1: 2.0}, {1: 2.0, 2: 2.2, 3: 2.1, 5: 3.0, 9: 4.0, 17: 6.0}, 2.0)
    assert costs.verify_costs == (0.1, 0.1, 0.5, 1.0, 2.0), "more drafts never cost less"
