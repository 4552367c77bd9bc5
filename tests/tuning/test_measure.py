"""C+1 runs of the graph per prompt say what it does under any thresholds: compared with really running it."""

from pathlib import Path

import numpy as np
import pytest
import tiers

from tide_export.common.changed_tokens import Change, added_loss, changed_tokens
from tide_export.errors import TuneError
from tide_export.runtime.engine import Engine, load
from tide_export.tuning.measure import Measurement, measure_prompts

PROMPT, POSITIONS, CHECKPOINTS = 10, 20, (3, 6, 9)
UNDECIDED = 1e-4  # a score this near to its threshold may fall to either side of it by rounding


@pytest.fixture(scope="module")
def engine(demo_bundle: Path) -> Engine:
    return load(demo_bundle, threads=1)


@pytest.fixture(scope="module")
def prompts(demo_text_ids: list[int]) -> list[list[int]]:
    size = PROMPT + POSITIONS - 1
    return [demo_text_ids[start : start + size] for start in range(0, tiers.sized(4, 8) * size, size)]


@pytest.fixture(scope="module")
def measured(engine: Engine, prompts: list[list[int]]) -> Measurement:
    return measure_prompts(engine, prompts, PROMPT, CHECKPOINTS)


def really_run(engine: Engine, ids: list[int], thresholds: list[float], max_pending: int | None):
    """Tokens and exit layers of the graph under these thresholds, position by position of the same text."""
    state = engine.start(thresholds, max_pending)
    results = []
    for end in range(PROMPT, len(ids) + 1):
        result = state.step(ids[state.length : end])
        results.append((int(result.logits.argmax()), result.exit_layer))
    return np.array(results).T


@pytest.mark.parametrize("max_pending", [None, 3, 0])
def test_any_thresholds_do_what_the_measurement_says(engine, prompts, measured, max_pending):
    random = np.random.default_rng(1)
    excused = compared = 0
    left = set()
    for _ in range(tiers.sized(3, 6)):
        thresholds = random.choice([*np.quantile(measured.scores, np.linspace(0.05, 0.98, 20)), 1.0], 3).tolist()
        tokens, layers = measured.outcome(thresholds)
        near = (np.abs(measured.scores - np.float32(thresholds)) < UNDECIDED).any(axis=2)
        for i, ids in enumerate(prompts):
            found = really_run(engine, ids, thresholds, max_pending)
            same = (found[0] == tokens[i]) & (found[1] == layers[i])
            assert (same | near[i]).all(), (thresholds, i, np.flatnonzero(~same))
            excused += int((~same).sum())
            compared += len(same)
        left |= set(layers.ravel().tolist())
    assert left == {3, 6, 9, 12}
    assert excused <= 0.005 * compared


def test_off_is_full_depth_and_has_no_loss(engine, prompts, measured):
    tokens, layers = measured.outcome([1.0] * 3)
    assert (layers == 12).all()
    assert (tokens == measured.full).all()
    assert measured.change([1.0] * 3) == Change(measured.full.size, 0.0, 0.0, 0.0, 0.0, 0.0)
    assert measured.losses([1.0] * 3).tolist() == [0.0] * len(prompts)
    found = really_run(engine, prompts[0], [2.0] * 3, None)
    assert (found[0] == measured.full[0]).all()


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_tokens_are_drawn_as_a_generation_draws_them(engine, prompts, temperature):
    measured = measure_prompts(engine, prompts[:2], PROMPT, CHECKPOINTS, temperature=temperature, seed=3)
    changed, added = [], []
    for i, ids in enumerate(prompts[:2]):
        states = [engine.start([-1.0 if k == c else 2.0 for k in range(3)], 2**62) for c in range(4)]
        for position, end in enumerate(range(PROMPT, len(ids) + 1)):
            options = {"max_new_tokens": 1, "temperature": temperature, "seed": 3 + i}
            assert engine.generate(ids[:end], mode="full", **options).tokens == [measured.full[i, position]]
            first = engine.generate(ids[:end], mode="exit", threshold=[0.0, 1.0, 1.0], **options)
            assert first.tokens == [measured.early[i, position, 0]]
            logits = [state.step(ids[state.length : end]).logits[None] for state in states]
            changed.append([changed_tokens(logits[3], one, temperature)[0] for one in logits[:3]])
            added.append([added_loss(logits[3], one, temperature)[0] for one in logits[:3]])
    np.testing.assert_allclose(measured.added.reshape(-1, 3), added, atol=1e-4)
    expected = np.array(changed)
    spread = np.sqrt((expected * (1 - expected)).sum(axis=0))
    assert (np.abs(measured.changed.reshape(-1, 3).sum(axis=0) - expected.sum(axis=0)) <= 4.5 * spread).all()
    always = measured.change([0.0] * 3)
    assert (always.changed, always.temperature) == (pytest.approx(measured.changed[..., 0].mean()), temperature)
    assert always.perplexity == pytest.approx(np.expm1(measured.added[..., 0].mean()))


def test_a_loss_is_the_share_of_changed_tokens(measured):
    always = measured.losses([0.0] * 3)
    assert always == pytest.approx((measured.early[:, :, 0] != measured.full).mean(axis=1))
    assert 0 < always.mean() < 1


def test_some_checkpoints_only(engine, prompts, measured):
    part = measure_prompts(engine, prompts[:2], PROMPT, (6,))
    assert (part.early[..., 0] == measured.early[:2, :, 1]).all()
    assert part.scores[..., 0] == pytest.approx(measured.scores[:2, :, 1])
    assert part.layers == (6,)


def test_one_position_per_prompt(engine, prompts, measured):
    one = measure_prompts(engine, [ids[:PROMPT] for ids in prompts], PROMPT, CHECKPOINTS)
    assert one.full.tolist() == measured.full[:, :1].tolist()
    assert set(one.losses([0.0] * 3).tolist()) <= {0.0, 1.0}


def test_a_graph_that_does_not_obey_is_refused(engine, prompts, monkeypatch):
    start = engine.start
    monkeypatch.setattr(engine, "start", lambda thresholds, **options: start([2.0] * 3, **options))
    with pytest.raises(TuneError, match=r"exited after layer 12 instead of 3"):
        measure_prompts(engine, prompts[:1], PROMPT, CHECKPOINTS)


def test_a_router_without_a_score_is_refused(engine, prompts, monkeypatch):
    start = engine.start

    def without_scores(*given, **options):
        state = start(*given, **options)
        step = state.step
        state.step = lambda ids: step(ids)._replace(scores=np.full(3, np.nan, np.float32))
        return state

    monkeypatch.setattr(engine, "start", without_scores)
    with pytest.raises(TuneError, match="gave no score"):
        measure_prompts(engine, prompts[:1], PROMPT, CHECKPOINTS)
