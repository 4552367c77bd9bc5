"""Which token is picked: against the textbook, against statistics, and the same wherever it is drawn."""

import json
import math
from collections import Counter
from ctypes import CDLL, byref, c_double, c_float, c_int64, c_uint32, c_uint64, c_void_p
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiers
from distribution import deviation, probabilities

from tide_export.errors import GenerationError
from tide_export.runtime.config import GenerationConfig
from tide_export.runtime.native import check, library
from tide_export.runtime.stepping import sample

LOGITS = np.array([0.3, 2.0, -1.0, 2.0, 0.3, 1.2, -40.0, 0.3, 0.9, -0.2], np.float32)


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> list[int]:
    """Philox4x32-10, by its paper."""
    x, (k0, k1) = list(counter), key
    for _ in range(10):
        first, second = 0xD2511F53 * x[0], 0xCD9E8D57 * x[2]
        x = [second >> 32 ^ x[1] ^ k0, second & 0xFFFFFFFF, first >> 32 ^ x[3] ^ k1, first & 0xFFFFFFFF]
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return x


def noise(seed: int, position: int, token: int) -> float:
    """Gumbel noise, as docs/reference/decoding.md has it."""
    counter = (token // 4, position & 0xFFFFFFFF, position >> 32, 0)
    word = philox(counter, (seed & 0xFFFFFFFF, seed >> 32))[token % 4]
    return -math.log(-math.log((word + 0.5) / 2**32))


def by_hand(logits: np.ndarray, seed: int, position: int, **options: Any) -> int:
    """The kept token of the largest logit / T + noise."""
    temperature = options["temperature"]
    kept = probabilities(logits, **options)
    return max(sorted(kept), key=lambda token: float(logits[token]) / temperature + noise(seed, position, token))


def test_the_generator_is_philox() -> None:
    """Vectors of its authors' library."""
    assert philox((0, 0, 0, 0), (0, 0)) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    ones = 0xFFFFFFFF
    assert philox((ones,) * 4, (ones,) * 2) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
    pi = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0)
    assert philox(*pi) == [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]


@pytest.mark.parametrize("instruction_set", ["avx512", "avx2", "baseline"])
@pytest.mark.parametrize("count", [1, 64, 67, 200])
def test_a_kernel(kernels: Path, instruction_set: str, count: int) -> None:
    """Of scans of logits: the largest of each block of 64, the sum of weights, and which words of Philox are large."""
    random = np.random.default_rng(count)
    logits = 4 * random.standard_normal(count, dtype=np.float32)
    logits[count // 2] = -np.inf if count > 1 else 1
    maxima, total, found = np.zeros(4, np.float32), c_double(), c_uint64()
    key, position, least = (7, 2**32 - 1), (5, 1), 0xC0000000
    arrays = [(c_uint32 * 2)(*pair) for pair in (key, position)]
    scan = CDLL(str(kernels)).logits
    pointers = [c_void_p(logits.ctypes.data), c_int64(count), c_float(0.7), c_void_p(maxima.ctypes.data)]
    given = [*pointers, byref(total), *arrays, c_uint32(100), c_uint32(least), byref(found)]
    status = scan(instruction_set.encode(), *given)
    if status == 1:
        pytest.skip(f"this CPU has no {instruction_set}")
    assert status == 0
    blocks = [logits[i : i + 64].max() for i in range(0, count, 64)]
    np.testing.assert_array_equal(maxima[: len(blocks)], blocks)
    exact = np.exp((logits.astype(np.float64) - logits.max()) / 0.7).sum()
    assert math.isclose(total.value, exact, rel_tol=1e-6)
    words = [word for i in range(16) for word in philox((100 + i, *position, 0), key)]
    assert [found.value >> i & 1 for i in range(64)] == [word >= least for word in words]
    logits[count - 1] = np.nan
    assert scan(instruction_set.encode(), *given) == 2


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_no_logits_are_refused(temperature: float) -> None:
    with pytest.raises(GenerationError, match="no logits to choose a token from"):
        sample(np.zeros(0, np.float32), temperature=temperature, seed=1 if temperature else None)


@pytest.mark.parametrize("top_p", [0.3, 0.5, 0.9])
@pytest.mark.parametrize("scale", [2.0, 6.0])
def test_a_nucleus_of_many_tokens_is_whole(top_p: float, scale: float) -> None:
    """Rare tokens are passed over in blocks, but for those that belong to it."""
    random = np.random.default_rng(1)
    logits = (random.standard_normal(5000) * scale).astype(np.float32)
    kept = set(probabilities(logits, temperature=1.0, top_p=top_p))
    for position in range(10):
        seed = position + 7
        found = sample(logits, position, seed=seed, temperature=1.0, top_p=top_p)
        best = max(sorted(kept), key=lambda token: float(logits[token]) + noise(seed, position, token))
        assert found == best


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.3},
        {"temperature": 4.0},
        {"top_k": 5},
        {"top_p": 0.7},
        {"min_p": 0.2},
        {"top_k": 40, "top_p": 0.9, "min_p": 0.01, "temperature": 0.8},
    ],
)
def test_a_draw_is_the_largest_logit_with_its_noise(options: dict[str, Any]) -> None:
    random, options = np.random.default_rng(0), {"temperature": 1.0} | options
    for case in range(tiers.sized(60, 300)):
        logits = (random.standard_normal(random.integers(1, 300)) * random.choice([1, 4, 20])).astype(np.float32)
        if case % 3 == 0:
            logits = np.round(logits)  # full of ties
        if case % 5 == 0:
            logits[random.integers(0, len(logits), len(logits) // 2)] = -np.inf
        if not np.isfinite(logits.max()):
            continue
        seed, position = int(random.integers(0, 2**63)), int(random.integers(0, 2**33))
        found = sample(logits, position, seed=seed, **options)
        expected = by_hand(logits, seed, position, **options)
        scores = [float(logits[t]) / options["temperature"] + noise(seed, position, t) for t in (found, expected)]
        assert found == expected or math.isclose(*scores, rel_tol=1e-9)


def drawn(logits: np.ndarray, draws: int, **options: Any) -> Counter[tuple[int]]:
    """How often each token is drawn, over so many positions: as `sample`, and faster."""
    function, token, counts = library().tide_sample, c_int64(), np.zeros(len(logits), np.int64)
    given, values = json.dumps(options).encode(), np.ascontiguousarray(logits, np.float32)
    arguments = values.ctypes.data, len(values), byref(token)
    for position in range(draws):
        check(function(given, position, *arguments))
        counts[token.value] += 1
    return Counter({(number,): int(count) for number, count in enumerate(counts) if count})


@pytest.mark.parametrize(
    "options",
    tiers.exhaustive_beyond(
        2,
        [
            {"temperature": 1.0},
            {"temperature": 2.0, "top_k": 8, "top_p": 0.9, "min_p": 0.05},
            {"temperature": 0.7, "top_k": 5},
            {"temperature": 1.5, "top_p": 0.8},
            {"temperature": 1.0, "min_p": 0.3},
        ],
    ),
    ids=str,
)
def test_draws_follow_the_distribution(options: dict[str, Any]) -> None:
    """A million draws in all, by their chi-square statistic."""
    draws = 200_000
    counts = drawn(LOGITS, draws, seed=7, **options)
    expected = {(token,): share for token, share in probabilities(LOGITS, **options).items()}
    assert counts.keys() <= expected.keys()
    assert deviation(counts, expected, draws) < 5
    wrong = options | {"temperature": options["temperature"] * 1.03}
    other = {(token,): share for token, share in probabilities(LOGITS, **wrong).items()}
    assert deviation(counts, other, draws) > 5, "it would see a temperature that is 3 % off"


def test_draws_from_a_large_vocabulary_follow_the_distribution() -> None:
    logits = np.random.default_rng(2).standard_normal(5000).astype(np.float32) * 3
    logits[::3] = -np.inf
    draws, shares = 40_000, probabilities(logits)
    counts = drawn(logits, draws, temperature=1.0, seed=3)
    assert not any(token % 3 == 0 for (token,) in counts)
    assert abs(deviation(counts, {(token,): share for token, share in shares.items()}, draws)) < 5


def test_draws_at_neighbouring_positions_and_of_neighbouring_seeds_are_independent() -> None:
    """Pairs of tokens, each of which is drawn from a quarter."""
    draws = tiers.sized(16_000, 60_000)
    one, other = ([sample(np.zeros(4), at, temperature=1.0, seed=seed) for at in range(draws)] for seed in (7, 8))
    pairs = {
        "positions": Counter(zip(one[::2], one[1::2], strict=True)),
        "seeds": Counter(zip(one, other, strict=True)),
    }
    expected = {(a, b): 1 / 16 for a in range(4) for b in range(4)}
    for name, counts in pairs.items():
        assert abs(deviation(counts, expected, counts.total())) < 5, name


def test_the_same_seed_gives_the_same_tokens() -> None:
    def draw(seed: int) -> list[int]:
        return [sample(LOGITS, position, temperature=1.0, seed=seed) for position in range(50)]

    assert draw(7) == draw(7)
    assert draw(7) != draw(8)
    assert draw(2**63 - 1) != draw(2**62)


def test_no_seed_is_a_new_seed() -> None:
    first, second = ([sample(LOGITS, position, temperature=1.0) for position in range(200)] for _ in range(2))
    assert first != second


def test_greedy_takes_the_lowest_id_of_equals() -> None:
    assert sample(LOGITS) == 1
    assert sample(np.zeros(4)) == 0
    random = np.random.default_rng(3)
    for _ in range(200):
        logits = random.integers(0, 4, 30).astype(np.float32)
        assert sample(logits) == int(logits.argmax())


@pytest.mark.parametrize("k", [1, 7, 1500])
def test_top_k_keeps_exactly_k_and_the_lowest_ids_of_equals(k: int) -> None:
    logits = np.random.default_rng(1).integers(0, 4, 20000).astype(np.float32)
    kept = set(np.argsort(-logits, kind="stable")[:k].tolist())
    drawn = {sample(logits, position, temperature=1e30, top_k=k, seed=1) for position in range(400)}
    assert drawn <= kept
    assert len(drawn) > min(k, 200) // 2


def test_a_tiny_temperature_is_greedy_and_a_huge_one_uniform() -> None:
    assert {sample(LOGITS, position, temperature=1e-300, seed=1) for position in range(50)} == {1, 3}  # two are equal
    drawn = Counter(sample(LOGITS, position, temperature=1e300, seed=1) for position in range(2000))
    assert len(drawn) == len(LOGITS)


def test_tokens_masked_with_minus_infinity_are_never_drawn() -> None:
    logits = LOGITS.copy()
    logits[1] = logits[3] = -np.inf
    assert sample(logits) == 5
    assert not {1, 3} & {sample(logits, position, temperature=3.0, seed=2) for position in range(500)}


@pytest.mark.parametrize("broken", [np.nan, np.inf])
@pytest.mark.parametrize(("temperature", "top_k"), [(0.0, 0), (1.0, 0), (1.0, 3)])
def test_broken_logits_are_an_error(broken: float, temperature: float, top_k: int) -> None:
    logits = LOGITS.copy()
    logits[4] = broken
    with pytest.raises(GenerationError, match="not finite"):
        sample(logits, temperature=temperature, top_k=top_k)


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
