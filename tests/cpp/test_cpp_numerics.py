"""NaN, ties and thresholds at the edge: both runtimes do the same, and nothing exits that should not."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cpp_engine import CppEngine, facts
from tiny_model import TinyModel

from tide_export.errors import GenerationError
from tide_export.runtime.engine import load

PROMPT = [5, 17, 3, 17, 3]
MODES = ("full", "exit", "lossless")


class Changed(TinyModel):
    """The hand-made model with other weights."""

    def weights(self) -> dict[str, np.ndarray]:
        made = super().weights()
        self.change(made)
        return made

    def change(self, made: dict[str, np.ndarray]) -> None:
        raise NotImplementedError


class NanRouters(Changed):
    def change(self, made: dict[str, np.ndarray]) -> None:
        for k in (1, 2):
            made[f"router{k}"][:] = np.nan


class InfiniteHead(Changed):
    def change(self, made: dict[str, np.ndarray]) -> None:
        made["head"][:, 9] = np.inf


class Ties(Changed):
    """All logits are equal."""

    def change(self, made: dict[str, np.ndarray]) -> None:
        made["head"][:] = 0.0


@pytest.fixture(params=["python", "cpp"])
def opened(request: pytest.FixtureRequest, open_cpp: Callable[..., CppEngine], tmp_path: Path) -> Callable[..., Any]:
    def opens(model: TinyModel) -> Any:
        bundle = model.write(tmp_path / "changed")
        return load(bundle, threads=1) if request.param == "python" else open_cpp(bundle)

    return opens


@pytest.mark.parametrize("mode", ["exit", "lossless"])
def test_a_score_that_is_not_a_number_never_exits(tiny_engine: Any, opened: Callable[..., Any], mode: str) -> None:
    full = tiny_engine.generate(PROMPT, max_new_tokens=12, mode="full")
    drafting = {"prompt_lookup": 0} if mode == "lossless" else {}
    done = opened(NanRouters()).generate(PROMPT, max_new_tokens=12, mode=mode, threshold=0.0, **drafting)
    assert done.tokens == full.tokens
    assert done.stats.exit_layer == [6] * 12
    assert done.stats.drafted == 0


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 3, "top_p": 0.5}])
@pytest.mark.parametrize("mode", MODES)
def test_logits_that_are_not_finite_give_no_token(
    opened: Callable[..., Any], mode: str, options: dict[str, Any]
) -> None:
    engine = opened(InfiniteHead())
    for _ in range(2):
        with pytest.raises(GenerationError, match="the model's logits are not finite"):
            engine.generate(PROMPT, max_new_tokens=4, mode=mode, **options)


@pytest.mark.parametrize("mode", MODES)
def test_of_equal_logits_the_lowest_id_is_taken(opened: Callable[..., Any], mode: str) -> None:
    engine = opened(Ties())
    assert engine.generate(PROMPT, max_new_tokens=5, mode=mode).tokens == [0] * 5
    drawn = engine.generate(PROMPT, max_new_tokens=20, mode=mode, temperature=1.0, top_k=2, seed=1).tokens
    assert set(drawn) == {0, 1}


@pytest.mark.parametrize("mode", ["exit", "lossless"])
def test_threshold_0_lets_everything_exit_and_1_nothing(tiny_engine: Any, mode: str) -> None:
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
def test_a_score_equal_to_its_threshold_does_not_exit(tiny_engine: Any, checkpoint: int) -> None:
    score = tiny_engine.start([2.0, 2.0]).step(PROMPT).scores[checkpoint]
    for threshold, exits in ((score, False), (np.nextafter(score, np.float32(0)), True)):
        thresholds = [2.0, 2.0]
        thresholds[checkpoint] = float(threshold)
        assert (tiny_engine.start(thresholds).step(PROMPT).exit_layer < 6) == exits


@pytest.mark.parametrize("mode", ["exit", "lossless"])
def test_neither_threads_nor_pending_tokens_change_what_is_drawn(
    tiny_engine: Any, tiny_bundle: Path, open_cpp: Callable[..., CppEngine], mode: str
) -> None:
    python = not isinstance(tiny_engine, CppEngine)
    two = load(tiny_bundle, threads=2) if python else open_cpp(tiny_bundle, threads=2)
    for options in ({}, {"temperature": 1.3, "seed": 5}):
        request = {"max_new_tokens": 20, "mode": mode, "threshold": 0.5, **options}
        expected = tiny_engine.generate(PROMPT, **request)
        assert facts(two.generate(PROMPT, **request)) == facts(expected)
        if mode == "exit" or not options:  # drawn in lossless mode, tokens depend on when they are verified
            for max_pending in (0, 1, 7, 1000):
                assert tiny_engine.generate(PROMPT, **request, max_pending=max_pending).tokens == expected.tokens
