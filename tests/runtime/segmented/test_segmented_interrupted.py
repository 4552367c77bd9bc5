"""On segment networks, a read that an exception ends in the middle of a step ends the stream; elsewhere it goes on."""

from itertools import count

import pytest
from interruptions import interrupted

from tide_export.errors import GenerationError
from tide_export.runtime.engine import Engine

NEW_TOKENS = 6


@pytest.mark.parametrize("mode", ["exit", "lossless"])
def test_no_token_is_lost_or_wrong(engines: tuple[Engine, Engine, list[float]], mode: str) -> None:
    _, engine, thresholds = engines
    options = {"mode": mode, "threshold": thresholds, "max_new_tokens": NEW_TOKENS}
    expected = engine.generate([3, 4, 5], **options).tokens
    ended = went_on = 0
    for point in count(step=13):
        stream = engine.stream([3, 4, 5], **options)
        next(stream)
        if not interrupted(lambda stream=stream: next(stream), point):
            break
        if stream._state._buffers.busy:
            for _ in range(2):
                with pytest.raises(GenerationError, match="interrupted in the middle of a step: start it again"):
                    next(stream)
            ended += 1
        else:
            assert stream.tokens + list(stream) == expected
            went_on += 1
        del stream
        assert engine.generate([3, 4, 5], **options).tokens == expected
    assert ended > 3
    assert went_on > 3
