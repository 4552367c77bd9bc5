"""Where checkpoints pay: what is looked at is the model's own, and few are chosen, each worth more than it costs."""

import numpy as np
import pytest
import torch

from tide_export.calibration.assessment import Costs
from tide_export.calibration.config import TideConfig
from tide_export.calibration.placement import BRANCH_COST, RECALL, LayerStatistics, choose_checkpoints, measure_layers
from tide_export.errors import CalibrationError

CHEAP = Costs(layer=1.0, head=0.0, router=0.01, lens=0.0)
DEPTH = 12


def settled_after(layers, tokens=400, depth=DEPTH):
    """Tokens whose answer does not change any more after `layers` layers (one number, or one for each)."""
    first = np.asarray(layers) if np.ndim(layers) else np.full(tokens, layers)
    return looked(np.arange(1, depth + 1) >= first[:, None])


def looked(unchanged):
    unchanged = unchanged.copy()
    unchanged[:, -1] = True
    nothing = np.zeros(unchanged.shape, np.float32)
    return LayerStatistics(unchanged, nothing, nothing)


def costing(router, lens=0.0):
    return Costs(layer=1.0, head=0.0, router=router, lens=lens)


def saved_by(unchanged, chosen, router):
    """Layers saved per token, told token by token: a share RECALL leaves at the first checkpoint behind settling."""
    total = 0.0
    for row in unchanged:
        here = 1.0
        for layers in chosen:
            total -= here * router
            if here == 1.0 and row[layers - 1 :].all():
                total += RECALL * (len(row) - layers)
                here = 1 - RECALL
    return total / len(unchanged) - len(chosen) * BRANCH_COST * unchanged.shape[1]


@pytest.mark.parametrize("min_layers", [0, 1, 5])
def test_nothing_pays_where_no_token_is_settled_before_the_end(min_layers):
    with pytest.raises(CalibrationError, match=f"no checkpoint from layer {max(1, min_layers)} on saves more"):
        choose_checkpoints(settled_after(DEPTH), CHEAP, min_layers)


def test_a_model_settled_after_layer_3_leaves_there_first():
    assert choose_checkpoints(settled_after(3), costing(4.0), 0) == (3,)
    assert choose_checkpoints(settled_after(3), CHEAP, 0) == (3,)


def test_a_prediction_that_is_lost_again_is_luck():
    unchanged = np.zeros((400, DEPTH), bool)
    unchanged[:, 1] = True  # after 2 layers, and not after 3
    unchanged[:, 8:] = True
    assert min(choose_checkpoints(looked(unchanged), CHEAP, 0)) == 9


def test_two_kinds_of_tokens_get_two_places():
    kinds = settled_after(np.repeat([3, 9], 200))
    assert {3, 9} <= set(choose_checkpoints(kinds, CHEAP, 0))


def test_dearer_routers_and_lenses_are_fewer():
    kinds = settled_after(np.random.default_rng(0).integers(2, DEPTH + 1, 2000))
    counts = [len(choose_checkpoints(kinds, costing(router), 0)) for router in (0.0, 0.2, 0.8)]
    assert counts[0] > counts[1] > counts[2] >= 1
    assert choose_checkpoints(kinds, costing(0.1, 0.1), 0) == choose_checkpoints(kinds, costing(0.2), 0)
    with pytest.raises(CalibrationError, match="saves more than it costs"):
        choose_checkpoints(kinds, costing(20.0), 0)


@pytest.mark.parametrize("min_layers", [1, 5, 11])
def test_none_before_min_layers(min_layers):
    chosen = choose_checkpoints(settled_after(3), CHEAP, min_layers)
    assert chosen[0] == max(3, min_layers)
    assert chosen[-1] < DEPTH


@pytest.mark.parametrize("seed", range(4))
def test_each_pays_and_no_other_would(seed):
    random = np.random.default_rng(seed)
    kinds = settled_after(random.integers(1, DEPTH + 3, 300).clip(1, DEPTH))
    router = float(random.uniform(0.0, 0.6))
    chosen = choose_checkpoints(kinds, costing(router), 0)
    assert list(chosen) == sorted(set(chosen))
    worth = saved_by(kinds.unchanged, chosen, router)
    assert worth > 0
    for layers in set(range(1, DEPTH)) - set(chosen):
        assert saved_by(kinds.unchanged, sorted([*chosen, layers]), router) <= worth + 1e-9
    # The first one taken is the best by itself.
    alone = {layers: saved_by(kinds.unchanged, [layers], router) for layers in range(1, DEPTH)}
    assert max(alone, key=lambda layers: alone[layers]) in chosen


def test_looking_gives_the_models_own_states_after_every_layer(demo, sequences):
    some = sequences[:3]
    found = measure_layers(demo, some, TideConfig(), 1000)
    rows = []
    with torch.no_grad():
        for sequence in some:
            ids = torch.from_numpy(sequence.ids).long()[None]
            rows.append([state[0] for state in demo.run(ids, range(1, 13)).raw.values()])
        states = [torch.cat(parts) for parts in zip(*rows, strict=True)]
        logits = [demo.model.lm_head(demo.model.model.norm(state)).log_softmax(-1) for state in states]
    full, order = logits[-1], in_order(found, states, some)
    for layer in range(12):
        unchanged = (logits[layer].argmax(-1) == full.argmax(-1)).numpy()[order]
        assert (found.unchanged[:, layer] == unchanged).mean() > 0.99  # a tie may fall either way
        kl = (full.exp() * (full - logits[layer])).sum(-1).numpy()[order]
        assert np.allclose(found.kl[:, layer], kl, atol=1e-3)
        cosine = torch.cosine_similarity(states[layer], states[-1], dim=-1).numpy()[order]
        assert np.allclose(found.cosine[:, layer], cosine, atol=1e-4)
    told = found.convergence()
    assert told.tokens == 3 * 48
    assert told.layers == tuple(range(1, 13))
    assert told.changed[-1] == 0.0
    assert told.kl[5] == pytest.approx(found.kl[:, 5].mean())
    assert told.cosine[0] == pytest.approx(found.cosine[:, 0].mean())


def in_order(found, states, sequences):
    """The sequences are looked at in an order of their own: which token is in each row."""
    cosines = torch.cosine_similarity(states[0], states[-1], dim=-1).numpy()
    size = len(sequences[0].ids)
    starts = [
        min(range(3), key=lambda n: np.abs(cosines[n * size : (n + 1) * size] - found.cosine[at : at + size, 0]).max())
        for at in range(0, 3 * size, size)
    ]
    assert sorted(starts) == [0, 1, 2]
    return np.concatenate([np.arange(n * size, (n + 1) * size) for n in starts])


def test_no_more_tokens_are_looked_at_than_needed(demo, sequences):
    assert len(measure_layers(demo, sequences, TideConfig(), 50).unchanged) == 50
