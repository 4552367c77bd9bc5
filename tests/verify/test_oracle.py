"""The judge judged: it equals Hugging Face with every checkpoint off, and a hand-written loop with them on."""

from pathlib import Path

import pytest
import torch

from tide_export.model.source import load_model
from tide_export.routers.router import Router
from tide_export.routers.router_set import RouterSet
from tide_export.thresholds.resolve import NEVER_EXIT
from tide_export.verify.oracle import oracle

CHECKPOINTS = (3, 6, 9)
IDS = [573, 1003, 391, 1266, 382, 1339, 83, 14, 538, 898, 199, 199, 605, 2721, 199, 605, 3082, 7, 11, 2000]


@pytest.fixture(scope="module")
def demo():
    return load_model(Path(__file__).parents[2] / "demo" / "demo-llama")


@pytest.fixture(scope="module")
def routers(demo):
    torch.manual_seed(2)
    made = {layers: Router(demo.normalized_size, 16) for layers in CHECKPOINTS}
    for router in made.values():
        router.up.weight.data *= 8  # spreads the scores
    return RouterSet(made)


def by_hand(demo, routers, thresholds):
    """TIDE's rule, token by token, from Hugging Face's own hidden states (never the last one: that one is normed)."""
    with torch.no_grad():
        output = demo.model(input_ids=torch.tensor([IDS]), output_hidden_states=True)
        rows, exits = [], []
        for t in range(len(IDS)):
            row, exit_layer = output.logits[0, t], demo.num_layers
            for layers, threshold in zip(CHECKPOINTS, thresholds, strict=True):
                normed = demo.model.model.norm(output.hidden_states[layers][0, t])
                if float(routers.routers[layers](normed)) > threshold:
                    row, exit_layer = demo.model.lm_head(normed), layers
                    break
            rows.append(row)
            exits.append(exit_layer)
    return torch.stack(rows), exits


def test_everything_off_is_the_model_itself(demo, routers):
    with torch.no_grad():
        expected = demo.model(input_ids=torch.tensor([IDS])).logits[0]
    found = oracle(demo, routers, IDS, [NEVER_EXIT] * 3)
    assert torch.equal(found.logits, expected)
    assert set(found.exit_layers.tolist()) == {12}
    assert found.scores.shape == (len(IDS), 3)


@pytest.mark.parametrize(
    "thresholds",
    [[0.5, 0.5, 0.5], (0.6, 0.4, 0.55), [NEVER_EXIT, 0.5, 0.5], [0.55, NEVER_EXIT, NEVER_EXIT], [0.0, 0.0, 0.0]],
)
def test_first_exit_wins(demo, routers, thresholds):
    found = oracle(demo, routers, IDS, thresholds)
    rows, exits = by_hand(demo, routers, thresholds)
    assert found.exit_layers.tolist() == exits
    assert torch.allclose(found.logits, rows, atol=1e-4)


def test_the_cases_above_exercise_every_exit(demo, routers):
    seen = set()
    for thresholds in ([0.5, 0.5, 0.5], (0.6, 0.4, 0.55), [NEVER_EXIT, 0.5, 0.5], [0.55, NEVER_EXIT, NEVER_EXIT]):
        seen |= set(oracle(demo, routers, IDS, thresholds).exit_layers.tolist())
    assert seen == {3, 6, 9, 12}


def test_scores_are_of_normed_states_and_given_behind_the_exit_too(demo, routers):
    found = oracle(demo, routers, IDS, [0.0, 0.0, 0.0])
    assert set(found.exit_layers.tolist()) == {3}
    with torch.no_grad():
        states = demo.model(input_ids=torch.tensor([IDS]), output_hidden_states=True).hidden_states
        for column, layers in enumerate(CHECKPOINTS):
            expected = routers.routers[layers](demo.model.model.norm(states[layers][0]))
            assert torch.allclose(found.scores[:, column], expected, atol=1e-5)


def test_a_score_equal_to_the_threshold_stays(demo):
    still = RouterSet({layers: Router(demo.normalized_size, 4) for layers in CHECKPOINTS})
    for router in still.routers.values():
        router.up.weight.data.zero_()  # every score is exactly .5
    assert set(oracle(demo, still, IDS, [0.5] * 3).exit_layers.tolist()) == {12}
    assert set(oracle(demo, still, IDS, [0.5, 0.49, 0.5]).exit_layers.tolist()) == {6}


def test_a_tokens_answer_depends_on_its_prefix_alone(demo, routers):
    whole = oracle(demo, routers, IDS, [0.5] * 3)
    part = oracle(demo, routers, tuple(IDS[:9]), [0.5] * 3)
    assert part.exit_layers.tolist() == whole.exit_layers[:9].tolist()
    assert torch.allclose(part.logits, whole.logits[:9], atol=1e-4)


@pytest.mark.parametrize("thresholds", [[0.5, 0.5], [0.5] * 4, []])
def test_one_threshold_per_checkpoint(demo, routers, thresholds):
    with pytest.raises(ValueError, match="zip"):
        oracle(demo, routers, IDS, thresholds)
