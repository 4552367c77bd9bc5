"""Whatever `generate` is given, it returns a generation or raises a TideError, and the engine stays as it was."""

import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tide_export.errors import TideError
from tide_export.runtime.config import GenerationOptions
from tide_export.runtime.engine import Engine, load

sys.path.append(str(Path(__file__).parents[1] / "runtime"))  # the hand-made model

from fuzz.settings import cases
from tiny_model import TinyModel

PROMPT = [5, 17, 3]


class Hostile:
    """An object whose conversions fail in their own ways."""

    def __index__(self) -> int:
        raise ZeroDivisionError

    def __float__(self) -> float:
        raise RuntimeError

    def __array__(self, *args: object, **kwargs: object) -> np.ndarray:
        raise KeyError

    def __repr__(self) -> str:
        return "Hostile\nobject"


NUMBERS = st.one_of(
    st.integers(-3, 60),
    st.sampled_from([2**31, 2**32, 2**63 - 1, 2**63, 2**64, -(2**63)]),
    st.builds(lambda digits: -(10**digits), st.sampled_from([400, 5000])),
    st.builds(lambda digits: 10**digits, st.sampled_from([400, 5000])),
    st.floats(allow_nan=True, allow_infinity=True),
    st.floats(0, 1),
    st.sampled_from([math.nan, math.inf, -0.0, 5e-324, 1.0, True, False, None]),
    st.builds(
        lambda kind, value: kind(value),
        st.sampled_from([np.int8, np.int64, np.float16, np.float32, np.float64, np.bool_]),
        st.integers(0, 3),
    ),
    st.sampled_from([np.uint64(2**64 - 1), np.float32("nan"), np.datetime64("NaT"), np.timedelta64(1, "s"), 1j]),
)
ODD = st.one_of(
    NUMBERS,
    st.text(max_size=4),
    st.binary(max_size=3),
    st.builds(Hostile),
    st.builds(object),
    st.sampled_from([range(3), {}, {1}, Ellipsis, int, np.array(3), np.array(0.5), np.array([]), np.zeros((0, 3))]),
    st.sampled_from([np.array([1, 2]), np.array([[1, 2]]), np.array([1.5]), np.array([None]), np.array(["a"])]),
)
NESTED = st.recursive(ODD, lambda inner: st.lists(inner, max_size=4) | st.tuples(inner, inner), max_leaves=8)
IDS = st.one_of(st.lists(st.integers(0, 47), min_size=1, max_size=6), st.lists(st.integers(-1, 48), max_size=3), NESTED)
GOOD: dict[str, st.SearchStrategy[Any]] = {
    "max_new_tokens": st.integers(1, 6),
    "mode": st.sampled_from(["full", "exit", "lossless"]),
    "threshold": st.floats(0, 1) | st.lists(st.floats(0, 1), min_size=2, max_size=2),
    "min_layers": st.integers(0, 7),
    "max_pending": st.integers(0, 5),
    "prompt_lookup": st.integers(0, 5),
    "drafter": st.integers(0, 5),
    "adapter": st.none(),
    "cache_salt": st.text(max_size=3),
    "states": st.booleans(),
    "temperature": st.floats(0, 3),
    "top_k": st.integers(0, 60),
    "top_p": st.floats(0.1, 1),
    "min_p": st.floats(0, 1),
    "repetition_penalty": st.floats(0.1, 3),
    "presence_penalty": st.floats(-2, 2),
    "frequency_penalty": st.floats(-2, 2),
    "logit_bias": st.dictionaries(st.integers(0, 47), st.floats(-100, 100), max_size=3),
    "logits_processor": st.sampled_from([lambda ids, logits: -logits, lambda ids, logits: ids, Hostile]),
    "logprobs": st.integers(0, 48),
    "prompt_logprobs": st.integers(0, 48),
    "seed": st.integers(0, 9),
    "stop_token_ids": st.lists(st.integers(0, 47), max_size=3),
    "prediction": st.lists(st.integers(0, 47), max_size=3),
    "stop": st.text(min_size=1, max_size=3) | st.lists(st.text(min_size=1, max_size=3), max_size=3),
    "json_schema": st.sampled_from([{}, {"type": "object"}, '{"type": "object"}', "{", {1: 2}]),
    "json_whitespace": st.booleans(),
    "regex": st.text(max_size=5),
    "grammar": st.text(max_size=5),
    "detokenize": st.just(False),
    "special_tokens": st.lists(st.integers(0, 47), max_size=3),
    "compaction_threshold": st.floats(0, 1),
}


@st.composite
def requests(draw: st.DrawFn) -> tuple[Any, dict[str, Any]]:
    """Ids and options, of which one or two are anything at all."""
    names = draw(st.lists(st.sampled_from(sorted(GOOD)), unique=True, max_size=5))
    options = {name: draw(GOOD[name]) for name in names}
    for name in draw(st.lists(st.sampled_from(sorted(GOOD)), unique=True, max_size=2)):
        options[name] = draw(NESTED)
    # A number of tokens that is accepted is small, so that a case is.
    if isinstance(options.get("max_new_tokens", 64), int | np.integer):
        options["max_new_tokens"] = min(options.get("max_new_tokens", 64), 6)
    return draw(IDS), options


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return load(TinyModel().write(tmp_path_factory.mktemp("fuzz") / "tiny"), threads=1)


@pytest.fixture(scope="module")
def expected(engine: Engine) -> list[int]:
    return engine.generate(PROMPT, max_new_tokens=2).tokens


def test_every_option_is_tried() -> None:
    assert GOOD.keys() == GenerationOptions.__annotations__.keys()


@cases(400, 4000)
@given(requests())
def test_generate(engine: Engine, expected: list[int], request_: tuple[Any, dict[str, Any]]) -> None:
    ids, options = request_
    try:
        done = engine.generate(ids, **options)
        assert all(type(token) is int for one in (done if isinstance(done, list) else [done]) for token in one.tokens)
    except TideError as error:
        text = str(error)
        assert text
        assert "\n" not in text
        assert len(text) < 400
    assert engine.generate(PROMPT, max_new_tokens=2).tokens == expected
