"""The comparison itself: it passes an engine that is right, and fails one that is wrong in token, layer or number.

The engine here is the oracle with the engine's interface, so that each test can spoil exactly one thing.
"""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch

from tide_export.model.source import SourceModel, load_model
from tide_export.routers.router import Router
from tide_export.routers.router_set import RouterSet
from tide_export.verify.oracle import oracle
from tide_export.verify.parity import TOLERANCES, Check, check_exit, check_full
from tide_export.verify.references import Expected

MODEL = Path(__file__).parents[2] / "demo" / "demo-llama"
CHECKPOINTS = (3, 6, 9)
PROMPTS = [[5], [7, 300, 21, 9], list(range(40, 60))]
NEW_TOKENS = 6


class Step(NamedTuple):
    logits: np.ndarray
    exit_layer: int
    segments_run: int
    scores: np.ndarray


class OracleEngine:
    """Answers like an engine; `spoil` may change each answer."""

    def __init__(self, source: SourceModel, routers: RouterSet, spoil: Callable[[Step], Step] = lambda step: step):
        self.source, self.routers, self.spoil = source, routers, spoil
        self.manifest = SimpleNamespace(checkpoints=CHECKPOINTS, segment_sizes=(3, 3, 3, 3))

    def start(self, thresholds, max_pending):
        ids: list[int] = []

        def step(new):
            ids.extend(new)
            out = oracle(self.source, self.routers, ids, thresholds)
            answer = Step(out.logits[-1].numpy(), int(out.exit_layers[-1]), 4, out.scores[-1].numpy())
            return self.spoil(answer)

        return SimpleNamespace(step=step)


@pytest.fixture(scope="module")
def source() -> SourceModel:
    return load_model(MODEL)


@pytest.fixture(scope="module")
def routers(source: SourceModel) -> RouterSet:
    """Random routers whose scores spread over [0, 1]."""
    torch.manual_seed(0)
    made = {}
    for layers in CHECKPOINTS:
        router = Router(source.normalized_size, 16).requires_grad_(False)
        router.up.weight *= 8
        made[layers] = router.eval()
    return RouterSet(made)


def exit_check(engine, source, routers, thresholds=(0.5, 0.5, 0.5)):
    return check_exit(engine, source, routers, PROMPTS, NEW_TOKENS, thresholds)


def test_a_right_engine_holds_and_uses_every_exit(source, routers):
    engine = OracleEngine(source, routers)
    full, exits = check_full(engine, source, PROMPTS, NEW_TOKENS), exit_check(engine, source, routers)
    assert full.holds
    assert exits.holds
    assert full.tokens == exits.tokens == len(PROMPTS) * NEW_TOKENS
    assert full.same_as_full == full.tokens
    assert full.exits == {12: full.tokens}
    assert sum(exits.exits.values()) == exits.tokens
    assert len(exits.exits) > 1, "the thresholds must make tokens leave at different layers for the test to mean much"
    assert full.max_error < 1e-4


def test_one_wrong_token_fails(source, routers):
    def second_best(step: Step) -> Step:
        logits = step.logits.copy()
        logits[logits.argmax()] = -100.0
        return step._replace(logits=logits)

    engine = OracleEngine(source, routers, second_best)
    for check in (check_full(engine, source, PROMPTS, NEW_TOKENS), exit_check(engine, source, routers)):
        assert not check.holds
        assert check.wrong
        assert "instead of" in check.differences[0]


def test_the_right_token_from_the_wrong_layer_fails(source, routers):
    engine = OracleEngine(source, routers, lambda step: step._replace(exit_layer=6 if step.exit_layer == 12 else 12))
    check = exit_check(engine, source, routers)
    assert not check.holds
    assert check.wrong + check.within_tolerance == check.tokens
    assert "layer" in check.differences[0]


def test_other_routers_fail(source, routers):
    other = {layers: Router(source.normalized_size, 16).eval().requires_grad_(False) for layers in CHECKPOINTS}
    assert not exit_check(OracleEngine(source, RouterSet(other)), source, routers).holds


def test_logits_that_are_no_numbers_fail(source, routers):
    engine = OracleEngine(source, routers, lambda step: step._replace(logits=np.full_like(step.logits, np.nan)))
    check = check_full(engine, source, PROMPTS, NEW_TOKENS)
    assert not check.holds
    assert check.as_dict()["max_logit_error"] is None


@pytest.mark.parametrize(("shift", "tolerated"), [(2e-5, True), (2e-3, False)])
def test_a_difference_is_tolerated_only_where_score_and_threshold_are_nearly_equal(source, routers, shift, tolerated):
    """The engine's threshold is a hair above the score of its first token, the reference's a hair below."""
    prompt = PROMPTS[1]
    score = float(oracle(source, routers, prompt, [2.0] * 3).scores[-1, 0])
    engine = OracleEngine(source, routers)
    inner = engine.start
    engine.start = lambda thresholds, max_pending: inner([score + shift, 2.0, 2.0], max_pending)
    check = check_exit(engine, source, routers, [prompt], 1, [score - shift, 2.0, 2.0])
    assert (check.within_tolerance, check.wrong) == ((1, 0) if tolerated else (0, 1))
    assert check.holds is tolerated


@pytest.mark.parametrize(("gap", "tolerated"), [(5e-5, True), (5e-3, False)])
def test_a_token_is_tolerated_only_where_the_reference_is_nearly_tied(source, routers, gap, tolerated, monkeypatch):
    engine = OracleEngine(source, routers)
    run = SourceModel.run

    def nearly_tied(self, input_ids, layers, attention_mask=None):
        states = run(self, input_ids, layers, attention_mask)
        best = states.logits[0, -1].topk(2)
        states.logits[0, -1, best.indices[1]] = best.values[0] + gap  # the reference now prefers the other by `gap`
        return states

    prompt, thresholds = PROMPTS[2], [2.0] * 3
    token = int(oracle(source, routers, prompt, thresholds).logits[-1].argmax())
    answer = engine.start(thresholds, 16).step(prompt)
    assert int(answer.logits.argmax()) == token
    engine.start = lambda thresholds, max_pending: SimpleNamespace(step=lambda ids: answer)
    monkeypatch.setattr(SourceModel, "run", nearly_tied)
    check = check_full(engine, source, [prompt], 1)
    assert (check.within_tolerance, check.wrong) == ((1, 0) if tolerated else (0, 1))


@pytest.mark.parametrize(
    ("precision", "gap", "tolerated"), [("int8 matmuls", 0.9, True), ("int8 matmuls", 1.1, False), ("fp32", 0.9, False)]
)
def test_rounded_inputs_leave_large_logits_that_are_nearly_tied_undecided(precision, gap, tolerated):
    """The largest is 35, of which 3 % are 1.05."""
    check = Check("full", "full", [], TOLERANCES[precision])
    check.compare_position(0, 1, 12, Expected(np.array([[35.0, 35.0 - gap, 0.0]]), [12]))
    assert (check.within_tolerance, check.wrong) == ((1, 0) if tolerated else (0, 1))


def test_nothing_compared_does_not_hold(source, routers):
    assert not check_full(OracleEngine(source, routers), source, [], NEW_TOKENS).holds
