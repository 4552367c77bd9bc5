"""Which token is picked: against a naive reference, against statistics, and the same twice for one seed."""

import math

import numpy as np
import pytest
from distribution import probabilities

from tide_export.errors import GenerationError
from tide_export.runtime.config import GenerationConfig
from tide_export.runtime.decoding.sampling import Sampler

LOGITS = np.array([0.3, 2.0, -1.0, 2.0, 0.3, 1.2, -40.0, 0.3, 0.9, -0.2], np.float32)


def naive(logits: list[float], temperature: float, top_k: int, top_p: float) -> dict[int, float]:
    """The textbook, in Python floats: sort, cut at k, softmax, cut where the sum reaches p, normalise."""
    ranked = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    if top_k:
        ranked = ranked[:top_k]
    weights = [math.exp((logits[token] - logits[ranked[0]]) / temperature) for token in ranked]
    total, added = math.fsum(weights), 0.0
    kept: dict[int, float] = {}
    for token, weight in zip(ranked, weights, strict=True):
        kept[token] = weight
        added += weight / total
        if top_p < 1 and added >= top_p:
            break
    total = math.fsum(kept.values())
    return {token: weight / total for token, weight in kept.items()}


@pytest.mark.parametrize("temperature", [0.25, 1.0, 3.0])
@pytest.mark.parametrize("top_k", [0, 1, 2, 4, 9, 10, 1000])
@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9, 0.999, 1.0])
def test_the_distribution_is_the_textbook_s(temperature: float, top_k: int, top_p: float) -> None:
    found = probabilities(Sampler(temperature, top_k, top_p), LOGITS)
    expected = naive(LOGITS.tolist(), temperature, top_k, top_p)
    assert found.keys() == expected.keys()
    assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (50, 0.9), (0, 0.9), (0, 0.999), (200, 1.0), (1, 1.0)])
@pytest.mark.parametrize("size", [257, 5000, 12345])
def test_the_distribution_of_a_large_vocabulary(size: int, top_k: int, top_p: float) -> None:
    logits = np.random.default_rng(0).standard_normal(size).astype(np.float32) * 4
    found = probabilities(Sampler(0.8, top_k, top_p), logits)
    expected = naive(logits.tolist(), 0.8, top_k, top_p)
    assert found.keys() == expected.keys()
    assert found == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("k", [1, 7, 60])
def test_top_k_of_a_large_vocabulary_full_of_equals(k: int) -> None:
    logits = np.random.default_rng(1).integers(0, 4, 20000).astype(np.float32)
    ids, _ = Sampler(1.0, top_k=k).distribution(logits)
    assert ids.tolist() == sorted(np.argsort(-logits, kind="stable")[:k].tolist())


def test_draws_from_a_large_vocabulary_follow_the_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    """The share of a token is that of the numbers that draw it; one that is masked has none."""
    logits = np.random.default_rng(2).standard_normal(5000).astype(np.float32) * 3
    logits[::3] = -np.inf
    sampler, numbers = Sampler(1.0), 60_000
    shares = probabilities(sampler, logits)
    ids, weights = sampler.distribution(logits)
    drawn = np.zeros(len(logits))
    for number in range(numbers):
        monkeypatch.setattr(sampler, "uniform", lambda number=number: number / (numbers - 1))
        drawn[sampler.draw(ids, weights)] += 1 / numbers
    assert not drawn[::3].any()
    np.testing.assert_allclose(drawn, [shares[token] for token in range(len(logits))], atol=2 / numbers)


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(1.0, 0, 1.0), (0.7, 5, 1.0), (1.5, 0, 0.8), (2.0, 7, 0.9)]
)
def test_draws_follow_the_distribution(temperature: float, top_k: int, top_p: float) -> None:
    draws = 20000
    sampler = Sampler(temperature, top_k, top_p, seed=1)
    counts = np.bincount([sampler(LOGITS) for _ in range(draws)], minlength=len(LOGITS))
    expected = naive(LOGITS.tolist(), temperature, top_k, top_p)
    for token, count in enumerate(counts):
        share = expected.get(token, 0.0)
        # Five standard deviations; a token that cannot be drawn has none and must never come.
        assert abs(count - draws * share) <= 5 * math.sqrt(draws * share * (1 - share)) + (1 if share else 0), token
    chi_square = sum((counts[t] - draws * p) ** 2 / (draws * p) for t, p in expected.items() if draws * p >= 5)
    assert chi_square < len(expected) + 6 * math.sqrt(2 * len(expected))


def test_the_same_seed_gives_the_same_tokens() -> None:
    def draw(seed: int) -> list[int]:
        sampler = Sampler(1.0, seed=seed)
        return [sampler(LOGITS) for _ in range(50)]

    assert draw(7) == draw(7)
    assert draw(7) != draw(8)


def test_no_seed_is_a_new_seed() -> None:
    samplers = [Sampler(1.0), Sampler(1.0)]
    first, second = ([sampler(LOGITS) for _ in range(200)] for sampler in samplers)
    assert first != second


def test_greedy_takes_the_lowest_id_of_equals() -> None:
    assert Sampler()(LOGITS) == 1
    assert Sampler(0.0, top_k=3, top_p=0.1, seed=5)(LOGITS) == 1
    assert Sampler()(np.zeros(4, np.float32)) == 0
    assert isinstance(Sampler()(LOGITS), int)
    assert isinstance(Sampler(1.0)(LOGITS), int)


def test_greedy_agrees_with_torch() -> None:
    torch = pytest.importorskip("torch")
    random = np.random.default_rng(3)
    for _ in range(200):
        logits = random.integers(0, 4, 30).astype(np.float32)  # full of ties
        assert Sampler()(logits) == torch.from_numpy(logits).argmax().item()


def test_top_k_keeps_exactly_k_and_the_lowest_ids_of_equals() -> None:
    ids, _ = Sampler(1.0, top_k=3).distribution(np.array([1.0, 2.0, 1.0, 1.0, 1.0], np.float32))
    assert ids.tolist() == [0, 1, 2]


def test_a_tiny_temperature_is_greedy_and_a_huge_one_uniform() -> None:
    assert {Sampler(1e-300, seed=seed)(LOGITS) for seed in range(50)} == {1, 3}  # the two best are equal
    _, weights = Sampler(1e300).distribution(LOGITS)
    np.testing.assert_allclose(weights, 1)


def test_a_tiny_temperature_warns_of_nothing(recwarn: pytest.WarningsRecorder) -> None:
    Sampler(5e-324)(LOGITS)
    assert not recwarn.list


@pytest.mark.parametrize(
    ("number", "weights", "drawn"),
    [
        (0.0, [0.0, 1.0, 1.0], 6),  # a weight of 0 is never drawn
        (0.5, [1.0, 1.0, 2.0], 7),  # a token's share begins at its edge
        (0.75, [1.0, 3.0, 12.0], 7),
        (1.0, [1.0, 1.0, 2.0], 7),  # as a product that is rounded up
    ],
)
def test_a_draw_takes_the_token_whose_share_holds_the_number(
    number: float, weights: list[float], drawn: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler = Sampler(1.0)
    monkeypatch.setattr(sampler, "uniform", lambda: number)
    assert sampler.draw(np.array([5, 6, 7]), np.array(weights)) == drawn


def test_restored_it_draws_the_same_again() -> None:
    sampler = Sampler(1.0, seed=3)
    sampler(LOGITS)
    saved = sampler.save()
    drawn = [sampler(LOGITS) for _ in range(20)]
    sampler.restore(saved)
    assert [sampler(LOGITS) for _ in range(20)] == drawn


def test_tokens_masked_with_minus_infinity_are_never_drawn() -> None:
    logits = LOGITS.copy()
    logits[1] = logits[3] = -np.inf
    assert Sampler()(logits) == 5
    assert probabilities(Sampler(1.0), logits)[1] == 0.0


@pytest.mark.parametrize("broken", [np.nan, np.inf])
@pytest.mark.parametrize(("temperature", "top_k"), [(0.0, 0), (1.0, 0), (1.0, 3)])
def test_broken_logits_are_an_error(broken: float, temperature: float, top_k: int) -> None:
    logits = LOGITS.copy()
    logits[4] = broken
    with pytest.raises(GenerationError, match="not finite"):
        Sampler(temperature, top_k)(logits)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"temperature": "1"},
        {"temperature": None},
        {"top_k": -1},
        {"top_k": 1.5},
        {"top_k": True},
        {"top_p": 0.0},
        {"top_p": 1.01},
        {"top_p": math.nan},
        {"seed": -1},
        {"seed": 0.5},
        {"seed": "abc"},
    ],
)
def test_options_out_of_range_are_named(options: dict) -> None:
    with pytest.raises(GenerationError, match=next(iter(options))):
        GenerationConfig(**options)


def test_numpy_numbers_are_numbers() -> None:
    config = GenerationConfig(temperature=np.float32(0.5), top_k=np.int64(3), top_p=np.float64(0.9), seed=np.uint8(1))
    assert (config.temperature, config.top_k, config.top_p, config.seed) == (0.5, 3, 0.9, 1)
