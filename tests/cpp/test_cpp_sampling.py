"""C++ samples with the Python sampler's probabilities; the random numbers differ."""

from typing import Any

import numpy as np
import pytest
from distribution import probabilities
from hooks import latest

from tide_export.runtime.decoding.sampling import Sampler
from tide_export.thresholds.resolve import NEVER_EXIT

DRAWS = 1200
PROMPT = [3, 1, 4, 1, 5]


def shares(engine: Any, count: int = 1, **options: Any) -> np.ndarray:
    """The share of each token as the second of `count` (of one: the first), over the seeds 0, 1, ..."""
    times = engine.call("draw", str(DRAWS), *engine.request(PROMPT, count, stop_token_ids=[], **options))
    drawn = np.zeros(48)
    drawn[[int(token) for token in times]] = list(times.values())
    return drawn / DRAWS


def assert_like(drawn: np.ndarray, expected: np.ndarray) -> None:
    """No token of probability 0, and every share within five standard deviations."""
    assert (drawn[expected == 0] == 0).all()
    assert (np.abs(drawn - expected) <= 5 * np.sqrt(expected * (1 - expected) / DRAWS) + 1e-12).all()


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1.0},
        {"temperature": 1.5, "top_k": 4},
        {"temperature": 2.0, "top_p": 0.8},
        {"temperature": 2.0, "top_k": 9, "top_p": 0.7},
        {"temperature": 3.0, "top_p": 0.05},
        {"temperature": 2.0, "min_p": 0.3},
        {"temperature": 3.0, "top_k": 12, "min_p": 0.2, "top_p": 0.9},
        {"temperature": 1e-300},
    ],
)
def test_draws_follow_the_distribution(tiny_engines: dict[str, Any], options: dict[str, Any]) -> None:
    logits = tiny_engines["python"].start([NEVER_EXIT, NEVER_EXIT]).step(PROMPT).logits
    expected = np.zeros(48)
    for token, share in probabilities(Sampler(**options), logits).items():
        expected[token] = share
    assert_like(shares(tiny_engines["cpp"], mode="full", **options), expected)


PROCESSED: dict[str, Any] = {"repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.1}
PROCESSED |= {"logit_bias": {7: 0.3, 9: -0.2}, "logits_processor": latest, "logprobs": 2}


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.3},
        {"temperature": 1.0, "top_k": 3, "top_p": 0.9},
        {"temperature": 0.5, "top_k": 9, "min_p": 0.1, "top_p": 0.9, **PROCESSED},
    ],
)
def test_lossless_draws_what_full_depth_draws_with_the_same_seed(
    tiny_engines: dict[str, Any], options: dict[str, Any]
) -> None:
    cpp, accepted, drafted = tiny_engines["cpp"], 0, 0
    for seed in range(4):
        sampled = {"max_new_tokens": 40, "stop_token_ids": [], "seed": seed, **options}
        lossless = cpp.generate(PROMPT, mode="lossless", threshold=0.1, **sampled)
        assert lossless.tokens == cpp.generate(PROMPT, mode="full", **sampled).tokens
        accepted, drafted = accepted + lossless.stats.accepted, drafted + lossless.stats.drafted
    assert 0 < accepted < drafted


def test_seeds(tiny_engines: dict[str, Any]) -> None:
    cpp, options = tiny_engines["cpp"], {"temperature": 2.0, "stop_token_ids": []}
    drawn = [cpp.generate(PROMPT, max_new_tokens=20, seed=seed, **options).tokens for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert (
        cpp.generate(PROMPT, max_new_tokens=20, **options).tokens
        != cpp.generate(PROMPT, max_new_tokens=20, **options).tokens
    )
