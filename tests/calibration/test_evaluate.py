"""The measurements on held-out tokens against plain loops over the Hugging Face model; what follows from thresholds."""

import numpy as np
import pytest
import torch

from tide_export.calibration.assessment import Costs, Evaluation
from tide_export.calibration.collect import collect
from tide_export.calibration.config import TideConfig
from tide_export.calibration.evaluate import count_costs, evaluate, read_examples
from tide_export.common.changed_tokens import Change, added_loss, changed_tokens
from tide_export.routers.random_routers import random_routers
from tide_export.thresholds.resolve import MAX_THRESHOLD
from tide_export.verify.oracle import oracle

CHECKPOINTS = (3, 9)


@pytest.fixture(scope="module", params=[0, 4], ids=["identity", "lens"])
def routers(request, demo, sequences):
    return random_routers(demo, CHECKPOINTS, sequences[5].ids.tolist(), lens_rank=request.param)


@pytest.fixture(scope="module")
def sample(demo, sequences):
    return collect(demo, sequences[:3], [*CHECKPOINTS, 12], TideConfig(), 10_000, "test")


@pytest.mark.parametrize(("label", "temperature"), [("unchanged", 0.8), ("kl", 1.2), ("cosine", 0.0)])
def test_against_the_model_itself(demo, sequences, routers, sample, label, temperature):
    config = TideConfig(label=label, kl_bound=0.5, convergence_threshold=0.9, temperature=temperature)
    found = evaluate(demo, routers, sample, config)
    assert (found.num_layers, found.checkpoints, found.temperature) == (12, CHECKPOINTS, temperature)
    assert temperature or (found.changed == ~found.unchanged).all()
    assert found.documents.tolist() == [s.document for s in sequences[:3] for _ in s.ids]
    row = 0
    for sequence in sequences[:3]:
        ids = torch.from_numpy(sequence.ids).long()[None]
        with torch.no_grad():
            output = demo.model(input_ids=ids, output_hidden_states=True)
            last = demo.run(ids, [12]).raw[12][0]
            full = output.logits[0].log_softmax(-1)
            for position in range(len(sequence.ids)):
                for k, layers in enumerate(CHECKPOINTS):
                    raw = output.hidden_states[layers][0, position]
                    state = demo.model.model.norm(routers.lenses[layers](raw) if routers.lenses else raw)
                    exit_ = demo.model.lm_head(state).log_softmax(-1)
                    kl = float((full[position].exp() * (full[position] - exit_)).sum())
                    same = int(exit_.argmax()) == int(full[position].argmax())
                    cosine = float(torch.cosine_similarity(raw, last[position], dim=0))
                    assert found.scores[row, k] == pytest.approx(float(routers.routers[layers](state)), abs=1e-3)
                    assert found.unchanged[row, k] == same
                    assert found.kl[row, k] == pytest.approx(kl, abs=1e-3)
                    assert found.labels[row, k] == {"unchanged": same, "kl": kl < 0.5, "cosine": cosine > 0.9}[label]
                    both = full[position].numpy()[None], exit_.numpy()[None]
                    assert found.changed[row, k] == pytest.approx(changed_tokens(*both, temperature)[0], abs=2e-3)
                    assert found.added[row, k] == pytest.approx(added_loss(*both, temperature)[0], abs=2e-3)
                row += 1
    assert row == len(found.scores)


def test_the_examples_are_read_as_the_oracle_reads(demo, tokenizer, sequences, routers):
    thresholds = [0.5, 0.5]
    documents = [s for n, s in enumerate(sequences) if s.document not in {other.document for other in sequences[:n]}]
    found = read_examples(demo, tokenizer, routers, sequences, thresholds)
    assert len(found) == 2
    for example, sequence in zip(found, documents, strict=False):
        ids = sequence.ids.tolist()
        judged = oracle(demo, routers, ids, thresholds)
        full = oracle(demo, routers, ids, [MAX_THRESHOLD, MAX_THRESHOLD]).logits.argmax(-1)
        said = judged.logits.argmax(-1)
        assert "".join(example.pieces) == tokenizer.decode(ids)
        assert list(example.exit_layers) == judged.exit_layers.tolist()
        assert list(example.predicted) == [tokenizer.decode([token]) for token in said.tolist()]
        assert list(example.unchanged) == (said == full).tolist()


# --- what follows from thresholds --------------------------------------------------------------------------------


def made_up(tokens=300, checkpoints=(2, 5, 7), depth=9, seed=0):
    random = np.random.default_rng(seed)
    shape = (tokens, len(checkpoints))
    return Evaluation(
        depth,
        checkpoints,
        (random.integers(0, 20, shape) / 20).astype(np.float32),  # with ties
        random.uniform(size=shape) < 0.5,
        random.uniform(size=shape) < 0.7,
        random.gamma(1.0, 1.0, shape).astype(np.float32),
        random.beta(1.0, 3.0, shape).astype(np.float32),
        random.normal(0.3, 1.0, shape).astype(np.float32),
        np.arange(tokens) // 10,
        0.8,
    )


@pytest.mark.parametrize(
    "thresholds",
    [[0.5, 0.5, 0.5], [MAX_THRESHOLD, 0.3, MAX_THRESHOLD], [MAX_THRESHOLD] * 3, [0.0, 0.0, 0.0], [0.9, 0.6, 0.2]],
)
def test_an_outcome_is_what_a_count_token_by_token_gives(thresholds):
    evaluation = made_up()
    found = evaluation.outcome(thresholds)
    changed, layers, kl, added, shares = [], [], [], [], np.zeros(3)
    for n in range(len(evaluation.scores)):
        left = next((k for k in range(3) if evaluation.scores[n, k] > np.float32(thresholds[k])), None)
        changed.append(0.0 if left is None else evaluation.changed[n, left])
        added.append(0.0 if left is None else evaluation.added[n, left])
        layers.append(9 if left is None else evaluation.checkpoints[left])
        kl.append(0.0 if left is None else evaluation.kl[n, left])
        if left is not None:
            shares[left] += 1
    assert found.thresholds == tuple(thresholds)
    assert (found.change.tokens, found.change.temperature) == (300, 0.8)
    assert found.change.changed == pytest.approx(np.mean(changed))
    assert found.layers == pytest.approx(np.mean(layers))
    assert found.kl == pytest.approx(np.mean(kl), abs=1e-6)
    assert found.change.perplexity == pytest.approx(np.exp(np.mean(added)) - 1, abs=1e-5)
    assert found.exit_shares == pytest.approx(shares / 300)


def test_nothing_leaves_and_nothing_changes():
    found = made_up().outcome([MAX_THRESHOLD] * 3)
    assert (found.layers, found.kl, found.change) == (9.0, 0.0, Change(300, 0.8, 0.0, 0.0, 0.0, 0.0))
    assert found.exit_shares == (0.0, 0.0, 0.0)


def test_a_score_equal_to_the_threshold_stays_as_in_the_graph():
    """0.55 in float32 is above 0.55 in float64: the comparison must be in the scores' own precision."""
    evaluation = made_up()
    at = float(np.float32(0.55)) - 1e-9
    expected = (evaluation.scores[:, 0] > np.float32(0.55)).mean()
    assert evaluation.outcome([at, MAX_THRESHOLD, MAX_THRESHOLD]).exit_shares[0] == pytest.approx(expected)


# --- costs -------------------------------------------------------------------------------------------------------


def test_a_token_pays_for_layers_head_and_every_router_it_reaches():
    evaluation = made_up()
    outcome = evaluation.outcome([0.5, 0.6, 0.7])
    costs = Costs(layer=100.0, head=30.0, router=7.0, lens=2.0)
    total = 0.0
    for n in range(len(evaluation.scores)):
        total += 30.0
        for k, threshold in enumerate((0.5, 0.6, 0.7)):
            total += 9.0
            if evaluation.scores[n, k] > np.float32(threshold):
                total += 100.0 * evaluation.checkpoints[k]
                break
        else:
            total += 900.0
    assert costs.per_token(outcome, evaluation.checkpoints) == pytest.approx(total / 300)


def test_costs_are_two_per_weight(demo):
    found = count_costs(demo, TideConfig(router_bottleneck_dim=16, router_shortlist=100, exit_strategy="identity"))
    layer = demo.model.model.layers[4]
    assert found.layer == 2 * sum(parameter.numel() for parameter in layer.parameters())
    assert found.head == 2 * 128 * 4096
    assert found.router == 2 * (128 * 16 + 16 + 128 * 100)
    assert found.lens == 0.0
    lens = count_costs(demo, TideConfig(router_bottleneck_dim=16, exit_strategy="lens", lens_rank=8))
    assert lens.lens == 2 * (128 * 8 + 8 * 128)
    assert count_costs(demo, TideConfig(exit_strategy="lens", lens_rank=999)).lens == 2 * 2 * 128 * 64
