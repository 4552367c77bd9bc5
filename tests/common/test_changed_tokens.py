"""Changed tokens and the change of perplexity: the definition against the runtime's own sampler, and what follows."""

import math

import numpy as np
import pytest

from tide_export.common.changed_tokens import Change, added_loss, change, changed_tokens
from tide_export.runtime.stepping import sample

DRAWS = 4000


def logits(vocabulary: int, seed: int, distance: float) -> tuple[np.ndarray, np.ndarray]:
    """Logits of full depth and of a mode at one position, float32 [1, V]."""
    random = np.random.default_rng(seed)
    full = 3 * random.normal(size=(1, vocabulary))
    return full.astype(np.float32), (full + distance * random.normal(size=full.shape)).astype(np.float32)


@pytest.mark.parametrize("temperature", [0.3, 0.8, 1.5])
@pytest.mark.parametrize(("vocabulary", "distance"), [(2, 1.0), (50, 0.1), (50, 1.0), (1000, 0.5)])
def test_equals_draws_of_the_runtime_with_the_same_noise(vocabulary: int, distance: float, temperature: float) -> None:
    full, mode = logits(vocabulary, vocabulary, distance)
    expected = float(changed_tokens(full, mode, temperature)[0])
    options = {"temperature": temperature, "seed": 5}
    drawn = [sample(full[0], n, **options) != sample(mode[0], n, **options) for n in range(DRAWS)]
    assert abs(np.mean(drawn) - expected) < 4.5 * math.sqrt(max(expected * (1 - expected), 1 / DRAWS) / DRAWS)


def test_is_not_the_total_variation_but_lies_within_its_bounds() -> None:
    full, mode = logits(50, 1, 1.0)
    p, q = (np.exp(one - one.max()) / np.exp(one - one.max()).sum() for one in (full, mode))
    distance = float(np.abs(p - q).sum() / 2)
    changed = float(changed_tokens(full, mode, 1.0)[0])
    assert distance + 0.005 < changed <= 2 * distance / (1 + distance)


def test_equals_the_sum_over_all_pairs_and_needs_no_order() -> None:
    full, mode = logits(30, 2, 1.0)
    full[0, 3], mode[0, 4] = -np.inf, -np.inf  # tokens that one of them never draws
    p, q = (np.exp(one[0].astype(float)) / np.exp(one[0].astype(float)).sum() for one in (full, mode))
    both = sum(1 / sum(max(p[j] / p[i], q[j] / q[i]) for j in range(30)) for i in range(30) if min(p[i], q[i]) > 0)
    assert changed_tokens(full, mode, 1.0)[0] == pytest.approx(1 - both, abs=1e-4)
    order = np.random.default_rng(0).permutation(30)
    assert changed_tokens(full[:, order], mode[:, order], 1.0)[0] == pytest.approx(1 - both, abs=1e-4)


def test_greedy_is_another_likeliest_token() -> None:
    full, mode = (np.concatenate(one) for one in zip(*(logits(20, seed, 2.0) for seed in range(40)), strict=True))
    changed = changed_tokens(full, mode, 0)
    assert changed.tolist() == [float(sample(a) != sample(b)) for a, b in zip(full, mode, strict=True)]
    assert 0 < changed.mean() < 1
    np.testing.assert_allclose(changed_tokens(full, mode, 1e-6), changed, atol=1e-6)


@pytest.mark.parametrize("temperature", [0.0, 0.8, 1.0])
def test_the_same_logits_change_nothing(temperature: float) -> None:
    full, _ = logits(1000, 3, 0.0)
    assert changed_tokens(full, full + 7, temperature)[0] == pytest.approx(0, abs=1e-5)
    assert added_loss(full, full + 7, temperature)[0] == pytest.approx(0, abs=1e-5)


@pytest.mark.parametrize("temperature", [0.0, 0.8, 1.0])
def test_added_loss_is_of_full_depths_own_draws(temperature: float) -> None:
    full, mode = logits(30, 4, 1.0)
    losses = [-(one[0].astype(float) - np.log(np.exp(one[0].astype(float)).sum())) for one in (full, mode)]
    drawn = [sample(full[0], n, temperature=temperature, seed=1) for n in range(DRAWS)]
    added = (losses[1] - losses[0])[drawn]
    expected = float(added_loss(full, mode, temperature)[0])
    assert abs(added.mean() - expected) < 1e-5 + 4.5 * added.std() / math.sqrt(DRAWS)
    if temperature == 1:
        p = np.exp(-losses[0])
        assert expected == pytest.approx(float((p * (losses[1] - losses[0])).sum()), abs=1e-5), "KL divergence"


def test_means_have_errors_over_texts() -> None:
    random = np.random.default_rng(0)
    spread = []
    for _ in range(400):
        by_text = random.uniform(size=10) < 0.3  # texts differ, their tokens do not
        made = change(by_text.repeat(5).astype(float), np.zeros(50), np.arange(10).repeat(5), 0.8)
        spread.append((made.changed, made.changed_error))
    means, errors = np.array(spread).T
    assert np.sqrt((errors**2).mean()) == pytest.approx(means.std(), rel=0.15)
    single = change(np.array([0.0, 1.0] * 50), np.full(100, 0.1), np.zeros(100, int), 0.8)
    assert single.changed_error == pytest.approx(0.5 / math.sqrt(99))
    assert (single.perplexity, single.perplexity_error) == (
        pytest.approx(math.exp(0.1) - 1),
        pytest.approx(0, abs=1e-9),
    )


def test_both_bounds_are_kept_with_an_error_to_spare() -> None:
    made = Change(1000, 0.8, changed=0.01, changed_error=0.002, perplexity=0.015, perplexity_error=0.003)
    assert made.within(0.012, 0.018)
    assert not made.within(0.0119, 0.1)
    assert not made.within(0.1, 0.0179)
    nothing = Change(40, 0.8, 0.0, 0.0, 0.0, 0.0)
    assert not nothing.within(0.02, 0.02), "40 tokens cannot show 2 %"
    assert nothing.within(0.025, 0.0)
