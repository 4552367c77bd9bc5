"""Options that change logits, and log-probabilities: equal in C++ and Python, alone and in lists, in every mode."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from cpp_engine import CppEngine, facts
from hooks import latest, none, parity, throws

from tide_export.errors import GenerationError
from tide_export.runtime.generation import Generation
from tide_export.runtime.engine import Engine, load

Both = tuple[Engine, CppEngine]

PROMPTS = [[3, 14, 15, 9, 3, 14, 15, 9], [2, 6], [5, 3, 5, 8, 9, 7, 9]]
COUNT = 14
OPTIONS: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.6},
    "repetition below 1": {"repetition_penalty": 0.7},
    "presence": {"presence_penalty": 0.45},
    "frequency": {"frequency_penalty": 0.13},
    "bias": {"logit_bias": {4: 0.4, 80: -100.0, 318: -0.75, 480: -100.0}},
    "hook": {"logits_processor": parity},
    "hook of the latest tokens": {"logits_processor": latest},
    "logprobs": {"logprobs": 3},
    "logprobs of the token alone": {"logprobs": 0},
}
OPTIONS["all"] = {name: value for option in OPTIONS.values() for name, value in option.items() if value != 0.7}
MODES: dict[str, dict[str, Any]] = {
    "full": {"mode": "full"},
    "exit": {"mode": "exit", "threshold": 0.5, "min_layers": 0},
    "lossless": {"mode": "lossless", "threshold": 0.5, "max_pending": 3, "prompt_lookup": 3},
}


@pytest.fixture(scope="module")
def both(tiny_llama, open_cpp: Callable[..., CppEngine]) -> Both:
    return load(tiny_llama.exact, threads=1), open_cpp(tiny_llama.exact)


def assert_same(cpp: Generation, python: Generation) -> None:
    assert facts(cpp) == facts(python)
    assert_close(cpp, python)


def assert_close(cpp: Generation, python: Generation) -> None:
    """Log-probabilities, up to rounding."""
    assert (cpp.logprobs is None) == (python.logprobs is None)
    for ours, theirs in zip(cpp.logprobs or (), python.logprobs or (), strict=True):
        assert [token for token, _ in ours.top] == [token for token, _ in theirs.top]
        values = [[one.logprob, *(logprob for _, logprob in one.top)] for one in (ours, theirs)]
        np.testing.assert_allclose(*values, atol=1e-4)


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
@pytest.mark.parametrize("option", OPTIONS.values(), ids=OPTIONS)
def test_tokens(both: Both, option: dict[str, Any], mode: dict[str, Any]) -> None:
    python, cpp = both
    options = {"max_new_tokens": COUNT, "stop_token_ids": [], **mode, **option}
    alone = [cpp.generate(ids, **options) for ids in PROMPTS]
    for ids, ours in zip(PROMPTS, alone, strict=True):
        assert_same(ours, python.generate(ids, **options))
    for ours, theirs in zip(cpp.generate_batch(PROMPTS, **options), python.generate(PROMPTS, **options), strict=True):
        assert_same(ours, theirs)
    without = {name: value for name, value in options.items() if name not in option}
    plain = [cpp.generate(ids, **without).tokens for ids in PROMPTS]
    assert ([one.tokens for one in alone] == plain) == (list(option) == ["logprobs"]), "it has an effect"
    if mode["mode"] == "lossless":
        undrafted = {name: value for name, value in options.items() if name not in mode} | MODES["full"]
        full = [cpp.generate(ids, **undrafted) for ids in PROMPTS]
        for ours, theirs in zip(alone, full, strict=True):
            assert ours.tokens == theirs.tokens
            assert_close(ours, theirs)
        assert sum(one.stats.drafted for one in alone) > 0


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"temperature": 1.0, "min_p": 1.5}, r"min_p must lie in \[0, 1\], not 1.5"),
    ({"min_p": 0.5}, "min_p is for a temperature above 0"),
    ({"repetition_penalty": 0.0}, "repetition_penalty must be above 0, not 0.0"),
    ({"repetition_penalty": float("nan")}, "repetition_penalty must be a number, not nan"),
    ({"presence_penalty": -2.5}, r"presence_penalty must lie in \[-2, 2\], not -2.5"),
    ({"frequency_penalty": float("inf")}, "frequency_penalty must be a number, not inf"),
    ({"logit_bias": {-1: 1.0}}, "a token id of logit_bias must be a whole number, 0 or more, not -1"),
    ({"logit_bias": {10**6: 1.0}}, r"logit_bias holds token id 1000000, outside the vocabulary 0\.\."),
    ({"logit_bias": {3: float("-inf")}}, "a bias of logit_bias must be a number, not -inf"),
    ({"logprobs": -1}, "logprobs must be a whole number, 0 or more, not -1"),
    ({"logprobs": 10**6}, "logprobs must be a whole number from 0 to .*, not 1000000"),
    ({"logits_processor": none}, "logits_processor, logit_bias and grammar leave no token with a finite logit"),
    ({"logits_processor": throws}, "logits_processor failed: no rule fits$"),
]


@pytest.mark.parametrize(("options", "sentence"), REFUSED)
def test_refused(both: Both, options: dict[str, Any], sentence: str) -> None:
    for engine in both:
        with pytest.raises(GenerationError, match=sentence):
            engine.generate(PROMPTS[1], max_new_tokens=2, **options)
    assert len(both[1].generate(PROMPTS[1], max_new_tokens=2, stop_token_ids=[]).tokens) == 2
