"""NaN, ties and thresholds at the edge: nothing exits that should not, and no token comes of numbers that are none."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_model import TinyModel

from tide_export.errors import GenerationError
from tide_export.runtime.engine import Engine, load

PROMPT = [5, 17, 3, 17, 3]
MODES = ("full", "exit", "lossless")


@pytest.fixture
def opened(tmp_path: Path) -> Callable[..., Engine]:
    """An engine of the hand-made model, whose weights `change` changes."""

    def opens(change: Callable[[dict[str, np.ndarray]], object]) -> Engine:
        class Changed(TinyModel):
            def weights(self) -> dict[str, np.ndarray]:
                made = super().weights()
                change(made)
                return made

        return load(Changed().write(tmp_path / "changed"), threads=1)

    return opens


def setting(name: str, at: Any, value: float) -> Callable[[dict[str, np.ndarray]], object]:
    return lambda made: made[name].__setitem__(at, value)


@pytest.mark.parametrize("mode", ["exit", "lossless"])
def test_a_score_that_is_not_a_number_never_exits(
    tiny_engine: Engine, opened: Callable[..., Engine], mode: str
) -> None:
    full = tiny_engine.generate(PROMPT, max_new_tokens=12, mode="full")
    drafting = {"prompt_lookup": 0} if mode == "lossless" else {}
    engine = opened(lambda made: [made[f"router{k}"].fill(np.nan) for k in (1, 2)])
    done = engine.generate(PROMPT, max_new_tokens=12, mode=mode, threshold=0.0, **drafting)
    assert done.tokens == full.tokens
    assert done.stats.exit_layer == [6] * 12
    assert done.stats.drafted == 0


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 3, "top_p": 0.5}])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("at", "value"), [((slice(None), 9), np.inf), ((0, 5), np.nan)])
def test_logits_that_are_not_finite_give_no_token(
    opened: Callable[..., Engine], mode: str, options: dict[str, Any], at: Any, value: float
) -> None:
    engine = opened(setting("head", at, value))
    for more in ({}, {"logit_bias": {1: 1.0}}):
        with pytest.raises(GenerationError, match="the model's logits are not finite"):
            engine.generate(PROMPT, max_new_tokens=4, mode=mode, **options, **more)


@pytest.mark.parametrize("mode", MODES)
def test_of_equal_logits_the_lowest_id_is_taken(opened: Callable[..., Engine], mode: str) -> None:
    engine = opened(setting("head", slice(None), 0.0))
    assert engine.generate(PROMPT, max_new_tokens=5, mode=mode).tokens == [0] * 5
    drawn = engine.generate(PROMPT, max_new_tokens=20, mode=mode, temperature=1.0, top_k=2, seed=1).tokens
    assert set(drawn) == {0, 1}
    top = engine.generate(PROMPT, max_new_tokens=1, mode=mode, logprobs=3).logprobs[0].top
    assert top == tuple((token, pytest.approx(-np.log(48))) for token in range(3))


@pytest.mark.parametrize("mode", ["exit", "lossless"])
def test_threshold_0_lets_everything_exit_and_1_nothing(tiny_engine: Engine, mode: str) -> None:
    full = tiny_engine.generate(PROMPT, max_new_tokens=12, mode="full")
    nothing = tiny_engine.generate(PROMPT, max_new_tokens=12, mode=mode, threshold=1.0)
    assert nothing.tokens == full.tokens
    assert set(nothing.stats.exit_layer) <= {0, 6}  # 0: a prompt-lookup draft
    everything = tiny_engine.generate(PROMPT, max_new_tokens=12, mode=mode, threshold=0.0)
    if mode == "exit":
        assert everything.stats.exit_layer == [2] * 12
    else:
        assert everything.tokens == full.tokens
        assert everything.stats.drafted > 0


@pytest.mark.parametrize("checkpoint", [0, 1])
def test_a_score_equal_to_its_threshold_does_not_exit(tiny_engine: Engine, checkpoint: int) -> None:
    score = tiny_engine.start([1.0, 1.0]).step(PROMPT).scores[checkpoint]
    for threshold, exits in ((score, False), (np.nextafter(score, np.float32(0)), True)):
        thresholds = [2.0, 2.0]
        thresholds[checkpoint] = float(threshold)
        assert (tiny_engine.start(thresholds).step(PROMPT).exit_layer < 6) == exits


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("drawn", [{}, {"temperature": 1.3, "seed": 5}])
def test_neither_threads_nor_pending_tokens_change_a_token(
    tiny_engine: Engine, tiny_bundle: Path, mode: str, drawn: dict[str, Any]
) -> None:
    request = {"max_new_tokens": 20, "mode": mode, **drawn} | ({} if mode == "full" else {"threshold": 0.5})
    expected = tiny_engine.generate(PROMPT, **request)
    found = load(tiny_bundle, threads=2).generate(PROMPT, **request)
    assert (found.tokens, found.stats.exit_layer) == (expected.tokens, expected.stats.exit_layer)
    for max_pending in () if mode == "full" else (0, 1, 7, 1000):
        assert tiny_engine.generate(PROMPT, **request, max_pending=max_pending).tokens == expected.tokens
