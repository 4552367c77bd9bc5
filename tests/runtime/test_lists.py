"""What a list of prompts may be; that every sequence gets what it gets alone, gpu/test_device_lists.py shows."""

import numpy as np
import pytest
from tiny_engines import TinyLlama

from tide_export.errors import GenerationError
from tide_export.runtime.engine import Engine


@pytest.fixture(scope="module")
def engine(tiny_llama: TinyLlama) -> Engine:
    return tiny_llama.graph(tiny_llama.exact)


@pytest.mark.parametrize(
    ("prompts", "options", "says"),
    [
        ([[1], []], {}, "prompt 2 is empty"),
        ([[1], [10**7]], {}, "prompt 2 holds token id"),
        ([[1], 2], {}, "prompt 2 must be a flat list"),
        ([[1], [2]], {"prompt_lookup": 3}, "prompt_lookup is for mode 'lossless'"),
        ([[1], [2]], {"mode": "lossless", "prompt_lookup": -1}, "prompt_lookup must be"),
        ([[1], [2]], {"seed": [1]}, "1 seeds for 2 prompts"),
        ([[1], [2]], {"seed": [1, -1]}, "seed must be"),
        ([[1], [2]], {"compaction_threshold": 1.5}, "compaction_threshold must lie"),
        ([[1], [2]], {"max_new_tokens": 0}, "max_new_tokens"),
        ([1, 2], {"compaction_threshold": 0.5}, "compaction_threshold is for a list"),
    ],
)
def test_what_is_refused(engine: Engine, prompts: list, options: dict, says: str) -> None:
    with pytest.raises(GenerationError, match=says):
        engine.generate(prompts, **options)


def test_an_array_of_prompts(engine: Engine) -> None:
    found = engine.generate(np.array([[5, 6], [7, 8]]), max_new_tokens=3, mode="full")
    alone = [engine.generate(ids, max_new_tokens=3, mode="full").tokens for ids in ([5, 6], [7, 8])]
    assert [one.tokens for one in found] == alone
