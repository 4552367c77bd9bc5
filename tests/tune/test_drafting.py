"""The replay of lossless mode against lossless mode itself, and the search against every setting there is."""

import itertools

import numpy as np
import pytest

from tide_export.runtime.engine import Engine
from tide_export.tune.drafting import DRAFTS, StepCosts, best_setting, replay, step_costs
from tide_export.tune.measure import Measurement, measure_prompts

COSTS = StepCosts(draft=(1.0, 2.0), verify={1: 4.0, 5: 6.0}, plain=4.0)


def recording(scores: list, agrees: list) -> Measurement:
    """One text; scores [P, 2], agrees [P, 2]."""
    full = np.zeros((1, len(scores)), np.int64)
    return Measurement(
        np.array(scores, np.float32)[None], np.where(agrees, 0, 1).astype(np.int64)[None], full, (2, 4), 6
    )


def test_a_replay_by_hand() -> None:
    one = recording([[0.9, 0.9], [0.1, 0.9], [0.9, 0.9], [0.1, 0.1]], [[1, 1], [1, 0], [1, 1], [1, 1]])
    # Two drafts (1 + 2 seconds), the second wrong; verified over 3 (5 s): 2 tokens. One more draft (1 s), then the
    # routers say no: over 2 (4.5 s): 2 tokens.
    assert replay(one, COSTS, (0.5, 0.5), 2) == ((3 + 5 + 1 + 4.5) / 4, 3, 2)
    assert replay(one, COSTS, (1.0, 1.0), 2) == (4.0, 0, 0)
    assert replay(one, COSTS, (0.5, 0.5), 0) == (4.0, 0, 0)


def test_nothing_pays_when_every_draft_is_wrong() -> None:
    wrong = recording([[0.9, 0.9]] * 20, [[0, 0]] * 20)
    assert best_setting(wrong, COSTS).thresholds == (1.0, 1.0)
    assert best_setting(wrong, COSTS).speedup == 1.0


def test_the_search_finds_what_trying_everything_finds() -> None:
    rng = np.random.default_rng(0)
    scores = rng.random((6, 40, 2)).astype(np.float32)
    agrees = rng.random((6, 40, 2)) < scores**0.5
    noisy = Measurement(scores, np.where(agrees, 0, 1).astype(np.int64), np.zeros((6, 40), np.int64), (2, 4), 6)
    costs = StepCosts(draft=(0.3, 0.7), verify={1: 1.0, 13: 1.6}, plain=1.0)
    found = best_setting(noisy, costs)
    assert found.speedup == costs.plain / replay(noisy, costs, found.thresholds, found.max_drafts)[0]
    everything = max(
        costs.plain / replay(noisy, costs, thresholds, drafts)[0]
        for thresholds in itertools.product(np.linspace(0, 1, 11), repeat=2)
        for drafts in DRAFTS
    )
    assert found.speedup > 1.05
    assert found.speedup > everything - 0.03


@pytest.fixture(scope="module")
def engine(demo_bundle) -> Engine:
    from tide_export.runtime.engine import load

    return load(demo_bundle, threads=1)


def test_the_replay_expects_the_acceptance_that_generating_has(engine: Engine) -> None:
    """Drafts behind a wrong draft differ, so the counts are near; with one draft at a time they are equal."""
    rng = np.random.default_rng(1)
    count, length = len(engine.manifest.checkpoints), 24
    prompts = [rng.integers(5, 4000, 12).tolist() for _ in range(6)]
    full = [engine.generate(p, 60, mode="full", stop_token_ids=[]).tokens for p in prompts]
    texts = [p + tokens[:-1] for p, tokens in zip(prompts, full, strict=True)]
    recorded = measure_prompts(engine, texts, 12, engine.manifest.checkpoints)
    assert (recorded.full == np.array(full)).all()
    thresholds = [float(value) for value in np.quantile(recorded.scores, 0.4, axis=(0, 1))]
    costs = StepCosts((0.1,) * count, {1: 1.0, 2: 1.0}, 1.0)
    drafted = accepted = 0
    for p in prompts:
        stats = engine.generate(
            p, length, mode="lossless", threshold=thresholds, max_pending=1, stop_token_ids=[]
        ).stats
        drafted, accepted = drafted + stats.drafted, accepted + stats.accepted
    # The first token behind the prompt is never drafted, the last may not be: replay what lies between.
    inner = Measurement(
        recorded.scores[:, 1 : length - 1],
        recorded.early[:, 1 : length - 1],
        recorded.full[:, 1 : length - 1],
        recorded.layers,
        recorded.depth,
    )
    _, expected_drafts, expected = replay(inner, costs, thresholds, 1)
    assert 0 < expected < expected_drafts
    assert abs(drafted - expected_drafts) <= len(prompts)
    assert abs(accepted - expected) <= len(prompts)


def test_step_costs_are_those_of_the_steps(engine: Engine) -> None:
    costs = step_costs(engine, [5, 6, 7, 8], most=4, rounds=5)
    assert len(costs.draft) == len(engine.manifest.checkpoints)
    assert list(costs.verify) == [1, 2, 3, 4, 5]
    assert min(costs.draft) < costs.plain  # a third of the layers against all of them
    assert costs.verifying(3) == costs.verify[3]
    assert min(costs.verify.values()) <= costs.verifying(7) <= max(costs.verify.values())
