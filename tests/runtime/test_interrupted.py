"""A read or a list that an exception ends at any point: nothing is lost, and nothing is fed twice."""

from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from interruptions import interrupted
from tiny_model import TinyModel

from tide_export.errors import GenerationError
from tide_export.runtime.generation import Generation
from tide_export.runtime.engine import Engine, TokenStream, load
from tide_export.runtime.sequence import SingleSequence

PROMPT = [5, 17, 3, 17, 3]
READ, TOKENS = 3, 6  # tokens before the interrupted read, and of the whole stream
CASES: dict[str, dict[str, Any]] = {
    "full": {"mode": "full"},
    "exit": {"mode": "exit", "threshold": [0.5, 0.65], "max_pending": 2},
    "exit, drawn": {"mode": "exit", "threshold": 0.5, "temperature": 1.5, "seed": 3},
    "lossless": {"mode": "lossless", "threshold": 0.4, "max_pending": 2, "prompt_lookup": 3},
    "lossless, changed": {"mode": "lossless", "threshold": 0.4, "repetition_penalty": 1.5, "presence_penalty": 1.0},
    "lossless, drawn": {"mode": "lossless", "threshold": 0.4, "prompt_lookup": 0, "temperature": 1.5, "seed": 5},
}


def reading(engine: Engine, options: dict[str, Any], read: int) -> TokenStream:
    """A stream of which some tokens are read."""
    stream = engine.stream(PROMPT, max_new_tokens=TOKENS, **options)
    for _ in range(read):
        next(stream)
    return stream


def ended_everywhere(start: Callable[[], TokenStream], fewest: int) -> Iterator[TokenStream]:
    """A new stream for every point of its next read, which is ended there; there are `fewest` points or more."""
    for point in count():
        stream = start()
        before = stream.tokens
        if not interrupted(lambda stream=stream: next(stream), point):
            assert point >= fewest
            return
        assert stream.tokens == before
        assert stream.finish_reason is None
        yield stream


def assert_equal(stream: TokenStream, expected: Generation) -> None:
    """Reads the stream to its end."""
    assert stream.tokens + list(stream) == stream.tokens == expected.tokens
    assert stream.finish_reason == expected.finish_reason
    counts = [
        one.as_dict() | {"prefill_seconds": 0, "decode_seconds": 0, "tokens_per_second": 0}
        for one in (stream.stats, expected.stats)
    ]
    assert counts[0] == counts[1]


@pytest.mark.parametrize(("name", "read"), [*((name, READ) for name in CASES), ("exit", 0), ("lossless", 0)])
def test_a_read_ended_at_any_point_makes_the_same_token_next(tiny_engine: Engine, name: str, read: int) -> None:
    expected = tiny_engine.generate(PROMPT, max_new_tokens=TOKENS, **CASES[name])
    for stream in ended_everywhere(lambda: reading(tiny_engine, CASES[name], read), fewest=25):
        assert_equal(stream, expected)


def test_ended_again_while_it_recovers(tiny_engine: Engine) -> None:
    expected = tiny_engine.generate(PROMPT, max_new_tokens=TOKENS, **CASES["lossless"])

    def ended_once() -> TokenStream:
        stream = reading(tiny_engine, CASES["lossless"], 0)
        assert interrupted(lambda: next(stream), 100)
        return stream

    for stream in ended_everywhere(ended_once, fewest=100):
        assert_equal(stream, expected)


@pytest.mark.parametrize("mode", ["full", "exit", "lossless"])
def test_after_an_error_the_same_error_comes_again(tiny_engine: Engine, tmp_path: Path, mode: str) -> None:
    expected = tiny_engine.generate(PROMPT, max_new_tokens=20, mode=mode).tokens
    broken = next(token for token in expected[2:] if token not in PROMPT)  # what comes after it is not a number

    class Broken(TinyModel):
        def weights(self) -> dict[str, np.ndarray]:
            made = super().weights()
            made["embed"][broken] = np.nan
            return made

    stream = load(Broken().write(tmp_path / "broken")).stream(PROMPT, max_new_tokens=20, mode=mode)
    for _ in range(3):
        with pytest.raises(GenerationError, match="the model's logits are not finite"):
            list(stream)
    assert stream.tokens == expected[: expected.index(broken) + 1]
    assert stream.finish_reason is None


def stepped(engine: Engine) -> SingleSequence:
    """A sequence of 6 tokens, of which some are pending and whose K/V buffers are full."""
    state = engine.start([0.5, 0.65], max_pending=4, room=1)
    for ids in (PROMPT, [7]):
        state.step(ids)
    assert any(state.pending)
    assert state.capacity == state.length
    return state


@pytest.mark.parametrize("ids", [[9], [9, 10, 11]])
def test_a_step_by_hand_ended_at_any_point_has_not_happened(
    tiny: TinyModel, tiny_engine: Engine, ids: list[int]
) -> None:
    sequence = [*PROMPT, 7, *ids, 20, 21]
    logits, exit_layers, _ = tiny.reference(sequence, [0.5, 0.65])
    for point in count():
        state = stepped(tiny_engine)
        if not interrupted(lambda state=state: state.step(ids), point):
            break
        result = state.step(ids)
        for at in range(6 + len(ids), len(sequence) + 1):
            np.testing.assert_allclose(result.logits, logits[at - 1], atol=2e-5)
            assert result.exit_layer == exit_layers[at - 1]
            assert state.length == at
            if at < len(sequence):
                result = state.step(sequence[at : at + 1])
    assert point > 100
