"""`GenerationConfig`: its fields are checked and frozen, and options by name override them."""

from dataclasses import FrozenInstanceError, fields

import numpy as np
import pytest

from tide_export.errors import GenerationError
from tide_export.runtime.config import GenerationConfig, GenerationOptions, with_options
from tide_export.runtime.engine import Engine


def test_the_options_are_the_fields() -> None:
    assert [field.name for field in fields(GenerationConfig)] == list(GenerationOptions.__annotations__)


def test_a_config_is_frozen_hashable_and_equal_to_its_like() -> None:
    config = GenerationConfig(threshold=np.array([0.5, 0.75]), seed=[1, 2], stop_token_ids=np.array([3]))
    assert config == GenerationConfig(threshold=(0.5, 0.75), seed=(1, 2), stop_token_ids=(3,))
    assert hash(config) == hash(GenerationConfig(threshold=[0.5, 0.75], seed=np.array([1, 2]), stop_token_ids=[3]))
    with pytest.raises(FrozenInstanceError):
        config.seed = 3


def test_options_override_the_config(tiny_engine: Engine) -> None:
    config = GenerationConfig(max_new_tokens=5, mode="full")
    assert with_options(None, {}) == GenerationConfig()
    assert with_options(config, {}) is config
    assert with_options(config, {"max_new_tokens": 7}) == GenerationConfig(max_new_tokens=7, mode="full")
    by_name = tiny_engine.generate([1, 2], max_new_tokens=7, mode="full").tokens
    assert tiny_engine.generate([1, 2], config).tokens == by_name[:5]
    assert tiny_engine.generate([1, 2], config, max_new_tokens=7).tokens == by_name
    assert list(tiny_engine.stream([1, 2], config)) == by_name[:5]


def test_options_are_checked_also_where_they_override(tiny_engine: Engine) -> None:
    with pytest.raises(GenerationError, match="top_p must be above 0"):
        tiny_engine.generate([1], GenerationConfig(), top_p=0)
    with pytest.raises(GenerationError, match="config must be a GenerationConfig, not 8"):
        tiny_engine.generate([1], 8)
    with pytest.raises(GenerationError, match="has no option 'beams'"):
        tiny_engine.generate([1], beams=3)
