"""The report's numbers, against slow and plain computations of the same."""

import numpy as np
import pytest
import report_data

from tide_export.calibration.operating_points import EPSILONS
from tide_export.errors import CalibrationError
from tide_export.report.findings import fixed_flops, halves, investigate, perfect_outcome, precision_recall


@pytest.fixture(scope="module")
def findings(assessment):
    return investigate(assessment)


def plain(evaluation, thresholds):
    """Changed tokens, change of perplexity, layers and exit counts, token by token."""
    layers, changed, added, left = [], [], [], [0] * (len(thresholds) + 1)
    for row, scores in enumerate(evaluation.scores):
        k = next((k for k, t in enumerate(thresholds) if scores[k] > np.float32(t)), len(thresholds))
        left[k] += 1
        layers.append([*evaluation.checkpoints, evaluation.num_layers][k])
        changed.append(0.0 if k == len(thresholds) else float(evaluation.changed[row, k]))
        added.append(0.0 if k == len(thresholds) else float(evaluation.added[row, k]))
    return np.mean(changed), np.expm1(np.mean(added)), np.mean(layers), np.array(left) / len(layers)


def test_no_document_is_in_both_halves_and_none_is_lost(assessment):
    chosen, measured, unit = halves(assessment.evaluation)
    assert unit == "documents"
    assert not set(chosen.documents) & set(measured.documents)
    assert len(chosen.documents) + len(measured.documents) == 4000
    assert 0.4 < len(chosen.documents) / 4000 < 0.6
    both = np.concatenate([chosen.scores, measured.scores])
    assert np.array_equal(np.sort(both, axis=0), np.sort(assessment.evaluation.scores, axis=0))


@pytest.mark.parametrize("sizes", [(4000,), (3900, 100)])
def test_tokens_are_halved_where_documents_cannot_be(assessment, sizes):
    belongs = np.repeat(np.arange(len(sizes)), sizes)
    chosen, measured, unit = halves(report_data.varied(assessment, documents=belongs).evaluation)
    assert unit == "tokens"
    assert len(chosen.documents) == len(measured.documents) == 2000
    assert np.array_equal(np.concatenate([chosen.kl, measured.kl]), assessment.evaluation.kl)


def test_choices_are_measured_where_they_were_not_chosen(assessment, findings):
    chosen, measured, _ = halves(assessment.evaluation)
    assert tuple(choice.epsilon for choice in findings.choices) == EPSILONS
    for choice in findings.choices:
        assert max(plain(chosen, choice.outcome.thresholds)[:2]) <= choice.epsilon
        changed, perplexity, layers, left = plain(measured, choice.outcome.thresholds)
        assert choice.outcome.change.changed == pytest.approx(changed)
        assert choice.outcome.change.perplexity == pytest.approx(perplexity)
        assert choice.outcome.layers == pytest.approx(layers)
        assert choice.outcome.exit_shares == pytest.approx(left[:-1])
    layers = [choice.outcome.layers for choice in findings.choices]
    assert layers == sorted(layers, reverse=True)
    assert layers[-1] < layers[0]


def test_nothing_simple_beats_the_choices(assessment, findings):
    chosen, _, _ = halves(assessment.evaluation)
    for choice in findings.choices:
        best = chosen.outcome(choice.outcome.thresholds).layers
        for t in np.linspace(0.02, 0.98, 25):
            single = chosen.outcome([t] * 3)
            within = max(single.change.changed, single.change.perplexity) <= choice.epsilon
            assert not within or best <= single.layers + 0.02


def test_the_curve_has_no_holes_where_the_routers_know_little():
    made = report_data.make(n=4000, depth=32, checkpoints=tuple(range(4, 32, 4)), knowledge=0.6, shift=-1.5)
    layers = sorted(outcome.layers for outcome in investigate(made).curve)
    assert np.diff(layers).max() < 4
    assert layers[-1] - layers[0] > 20


def test_the_perfect_router_and_efficiency(assessment, findings):
    _, measured, _ = halves(assessment.evaluation)
    wanted = [next((c for c, a in zip((3, 6, 9), row, strict=True) if a), 12) for row in measured.unchanged]
    assert findings.perfect.layers == pytest.approx(np.mean(wanted))
    assert findings.perfect.change.changed < 0.001, "of likely tokens"
    for choice in findings.choices:
        assert choice.efficiency == pytest.approx((12 - choice.outcome.layers) / (12 - np.mean(wanted)))


def test_compute_counts_routers_only_where_they_are_asked(assessment, findings):
    costs = assessment.costs
    choice = findings.choice(0.02)
    a, b, c = choice.outcome.exit_shares
    asked = 1 + (1 - a) + (1 - a - b)
    expected = costs.layer * choice.outcome.layers + costs.head + costs.router * asked
    assert choice.flops == pytest.approx(expected)
    assert findings.full_flops == pytest.approx(12 * 3.5e6 + 8.4e6)
    assert fixed_flops(costs, findings.fixed[1]) == pytest.approx(6 * 3.5e6 + 8.4e6)
    assert c > 0


def test_fixed_exits_are_each_checkpoint_s_own_averages(assessment, findings):
    _, measured, _ = halves(assessment.evaluation)
    for k, outcome in enumerate(findings.fixed):
        assert outcome.layers == (3, 6, 9)[k]
        assert outcome.change.changed == pytest.approx(measured.changed[:, k].mean())
        assert outcome.kl == pytest.approx(measured.kl[:, k].mean(), rel=1e-5)
        assert outcome.change.perplexity == pytest.approx(np.expm1(measured.added[:, k].astype(float).mean()))


def test_the_sweep_goes_from_nothing_to_everything(findings):
    assert findings.sweep[0].layers == 12
    assert findings.sweep[-1].layers == 3
    layers = [outcome.layers for outcome in findings.sweep]
    assert layers == sorted(layers, reverse=True)
    assert all(len(set(outcome.thresholds)) == 1 for outcome in findings.sweep)


def test_routers_at_the_default_threshold(assessment, findings):
    evaluation = assessment.evaluation
    for k, router in enumerate(findings.routers):
        left, may = evaluation.scores[:, k] > 0.85, evaluation.labels[:, k]
        assert router.precision == pytest.approx(may[left].mean())
        assert router.recall == pytest.approx(left[may].mean())
        assert (router.checkpoint, router.threshold) == ((3, 6, 9)[k], 0.85)


def test_precision_recall_by_hand():
    scores = np.array([0.9, 0.8, 0.8, 0.1])
    recall, precision = precision_recall(scores, np.array([True, False, True, False]))
    assert recall == pytest.approx([1 / 2, 1, 1])
    assert precision == pytest.approx([1, 2 / 3, 2 / 4])
    assert len(precision_recall(scores, np.zeros(4, bool))[0]) == 0


def test_perfect_where_every_exit_changes_the_token():
    nothing = report_data.varied(report_data.make(n=200), unchanged=np.zeros((200, 3), bool))
    assert perfect_outcome(nothing.evaluation).layers == 12
    assert np.isnan(investigate(nothing).choice(0.02).efficiency)


def test_one_token_is_refused():
    with pytest.raises(CalibrationError, match="two held-out tokens"):
        investigate(report_data.make(n=1))
