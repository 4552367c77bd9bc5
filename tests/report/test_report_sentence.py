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
    return replace(answer, sentence=answer.sentence.replace("\u202f", " "))


def default(assessment):
    return default_sentence(assessment, investigate(assessment)).replace("\u202f", " ")


def test_a_gain_with_its_numbers(assessment):
    answer, findings = said(assessment), investigate(assessment)
    choice = findings.choice(0.98)
    assert answer.gains
    assert answer.reason is None
    assert not answer.advice
    assert answer.sentence.startswith(
        "With exits tuned to keep 98 % of its tokens, demo-llama runs "
        f"{choice.outcome.layers:.1f} of 12 layers per token "
        f"({100 * (1 - choice.outcome.layers / 12):.0f} % fewer); a perfect router would run "
        f"{findings.perfect.layers:.1f} (router efficiency {100 * choice.efficiency:.0f} %)."
    )
    assert f"{100 * choice.outcome.agreement:.1f} % of the tokens are the full model's own" in answer.sentence
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
    assert not answer.gains
    assert answer.reason == reason
    assert "does not gain from early exits as calibrated" in answer.sentence
    assert because in answer.sentence
    assert try_this in answer.advice


def test_a_gain_at_a_lower_agreement_is_mentioned():
    # 7 in 8 tokens of a checkpoint agree, and nothing tells which: 98 % cannot be had, 85 % can.
    made = report_data.make(n=4000, checkpoints=(6,))
    agrees = (np.arange(4000) % 16 != 0)[:, None]
    blind = report_data.varied(made, scores=np.full((4000, 1), 0.9, np.float32), agrees=agrees, labels=agrees)
    assert "Keeping 90 % would save 50 %." in said(blind).sentence


def test_what_the_bundle_does(assessment):
    outcome = assessment.evaluation.outcome((0.85, 0.85, 0.85))
    sentence = default(assessment)
    assert f"runs {outcome.layers:.1f} of 12 layers per token" in sentence
    assert f"keeps {100 * outcome.agreement:.1f} % of the full model's tokens" in sentence
    assert f"{100 * (1 - sum(outcome.exit_shares)):.1f} % of the tokens run all layers" in sentence
    assert f"{100 * abs(outcome.perplexity_change):.1f} % higher" in sentence


def test_a_checkpoint_that_is_switched_off_is_named(assessment):
    assert "(checkpoint 3 is switched off)" in default(replace(assessment, thresholds=(1.0, 0.85, 0.85)))
    assert "(checkpoints 3 and 6 are switched off)" in default(replace(assessment, thresholds=(1.0, 1.0, 0.85)))
    assert "lets no token leave early" in default(replace(assessment, thresholds=(1.0, 1.0, 1.0)))


def test_thresholds_that_nothing_exceeds(assessment):
    low = report_data.varied(assessment, scores=np.full_like(assessment.evaluation.scores, 0.2))
    assert "no held-out token left early" in default(low)


def test_no_perplexity_is_not_mentioned(assessment):
    silent = report_data.varied(assessment, nll=np.full_like(assessment.evaluation.nll, np.nan))
    assert "perplexity" not in default(silent)
