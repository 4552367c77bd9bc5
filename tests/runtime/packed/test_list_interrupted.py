"""After a list that an exception ends the engine serves the next one; streams where K/V are propagated go on."""

from pathlib import Path

import pytest
from interruptions import interrupted

from tide_export.runtime.engine import Engine, load

PROMPTS = [[5, 17, 3], [8], [9, 9, 4, 2, 1]]
OPTIONS = {"max_new_tokens": 4, "threshold": 0.5, "min_layers": 0, "stop_token_ids": []}


@pytest.fixture(scope="module", params=["exact", "propagate"])
def engine(request: pytest.FixtureRequest, demo_bundle: Path, propagating_bundle: Path) -> Engine:
    return load(demo_bundle if request.param == "exact" else propagating_bundle, threads=1, verify=False)


def test_a_list_ended_at_any_point_leaves_the_engine_usable(engine: Engine) -> None:
    expected = [one.tokens for one in engine.generate(PROMPTS, **OPTIONS)]
    points = 0
    while interrupted(lambda: engine.generate(PROMPTS, **OPTIONS), points):
        assert [one.tokens for one in engine.generate(PROMPTS, **OPTIONS)] == expected
        points += 1 + 2 * points // 3
    assert points > 1000


def test_a_read_ended_at_any_point_makes_the_same_token_next(engine: Engine) -> None:
    expected = engine.generate(PROMPTS[0], **OPTIONS)
    point = 0
    while True:
        stream = engine.stream(PROMPTS[0], **OPTIONS)
        next(stream)
        if not interrupted(lambda stream=stream: next(stream), point):
            break
        assert stream.tokens + list(stream) == expected.tokens
        assert stream.stats.exit_layer == expected.stats.exit_layer
        assert stream.stats.layer_tokens_run == expected.stats.layer_tokens_run
        point += 5
    assert point > 50
