"""The sentence on top says what is so, in each of the cases there are."""

from dataclasses import replace

import numpy as np
import pytest
import report_data

from tide_export.report.findings import investigate
from tide_export.report.sentence import default_sentence, verdict
from tide_export.report.write import headline


def said(assessment):
    answer = verdict(assessment, investigate(assessment))
    return replace(answer, time=answer.time.replace("\u202f", " "), found=answer.found.replace("\u202f", " "))


def default(assessment):
    return default_sentence(assessment, investigate(assessment)).replace("\u202f", " ")


def test_a_gain_with_its_numbers(assessment):
    answer, findings = said(assessment), investigate(assessment)
    choice = findings.choice(0.02)
    assert answer.reason is None
    assert not answer.advice
    costs = assessment.costs
    speed = (12 * costs.layer + costs.head) / costs.per_token(choice.outcome, (3, 6, 9))
    assert speed > 1
    assert answer.time == (
        f"Decoding should run at {speed:.2f}x the speed of full depth with "
        f"{100 * choice.outcome.change.changed:.1f} % changed tokens, counting layers, head, routers and lenses; "
        "export measures it."
    )
    assert answer.found.startswith(
        "With at most 2 % changed tokens and 2 % more perplexity, demo-llama runs "
        f"{choice.outcome.layers:.1f} of 12 layers per token "
        f"({100 * (1 - choice.outcome.layers / 12):.0f} % fewer); a perfect router would run "
        f"{findings.perfect.layers:.1f} (router efficiency {100 * choice.efficiency:.0f} %)."
    )
    change = choice.outcome.change
    assert answer.sentence.endswith(
        f"Measured on text that the thresholds were not chosen on: {100 * change.changed:.1f} % changed tokens and a "
        f"perplexity of {100 * change.perplexity:+.1f} % at temperature 0.8."
    )
    assert headline(assessment).replace("\u202f", " ") == answer.sentence


@pytest.mark.parametrize(
    ("made", "reason", "because", "try_this"),
    [
        ({"shift": -9.0}, "heads", "early heads rarely", "lens"),
        (
            {"shift": -3.5, "checkpoints": (12, 23), "depth": 24, "knowledge": 0.5},
            "late",
            "only its last",
            "checkpoints",
        ),
        ({"knowledge": 0.0, "checkpoints": (3, 6)}, "routers", "cannot tell", "more calibration text"),
    ],
)
def test_no_gain_and_why(made, reason, because, try_this):
    answer = said(report_data.make(n=3000, **made))
    assert answer.reason == reason
    assert "does not gain from early exits as calibrated" in answer.sentence
    assert because in answer.sentence
    assert try_this in answer.advice


def test_a_gain_with_more_changed_tokens_is_mentioned():
    # An exit changes 1 in 16 tokens, and nothing tells which: 2 % cannot be had, 10 % can.
    made = report_data.make(n=4000, checkpoints=(6,))
    changed = (np.arange(4000) % 16 == 0)[:, None]
    scores = np.full((4000, 1), 0.9, np.float32)
    fields = {"scores": scores, "unchanged": ~changed, "labels": ~changed, "changed": changed.astype(np.float32)}
    blind = report_data.varied(made, **fields, added=0.5 * changed)
    assert "10 % of both would save 50 %." in said(blind).sentence
    dear = report_data.varied(made, **fields, added=3.0 * changed)
    assert "of both would save" not in said(dear).sentence, "perplexity rises by 21 %"


def test_what_the_bundle_does(assessment):
    outcome = assessment.evaluation.outcome((0.85, 0.85, 0.85))
    sentence = default(assessment)
    assert f"runs {outcome.layers:.1f} of 12 layers per token" in sentence
    assert f"with {100 * outcome.change.changed:.1f} % changed tokens" in sentence
    assert f"{100 * (1 - sum(outcome.exit_shares)):.1f} % of the tokens run all layers" in sentence
    assert f"a perplexity of {100 * outcome.change.perplexity:+.1f} % at temperature 0.8" in sentence


def test_depth_of_a_looped_model_is_in_loops_too(assessment):
    looped = report_data.varied(assessment, loops=4)
    choice, outcome = investigate(looped).choice(0.02).outcome, looped.evaluation.outcome((0.85, 0.85, 0.85))
    for sentence, layers in ((said(looped).sentence, choice.layers), (default(looped), outcome.layers)):
        assert f"{layers:.1f} of 12 layers per token, {layers / 3:.1f} of 4 loops (" in sentence
    assert "loops" not in said(assessment).sentence + default(assessment)


def test_a_checkpoint_that_is_switched_off_is_named(assessment):
    assert "(checkpoint 3 is switched off)" in default(replace(assessment, thresholds=(1.0, 0.85, 0.85)))
    assert "(checkpoints 3 and 6 are switched off)" in default(replace(assessment, thresholds=(1.0, 1.0, 0.85)))
    assert "lets no token leave early" in default(replace(assessment, thresholds=(1.0, 1.0, 1.0)))


def test_thresholds_that_nothing_exceeds(assessment):
    low = report_data.varied(assessment, scores=np.full_like(assessment.evaluation.scores, 0.2))
    assert "no held-out token left early" in default(low)
