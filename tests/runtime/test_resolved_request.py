"""What a `GenerationConfig` comes to for one bundle: every option as given, else as the bundle has it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tide_export.bundle.manifest import DEFAULT_VERIFY_COSTS, PROPAGATE, Drafting
from tide_export.bundle.opened import Bundle, open_bundle
from tide_export.errors import GenerationError
from tide_export.runtime.config import GenerationConfig
from tide_export.runtime.decoding.lossless import DraftLimits
from tide_export.runtime.request import check_exits, check_prompt, is_list_of_prompts, resolve, seeds, single_seed
from tide_export.runtime.sequence import NO_LIMIT
from tide_export.thresholds.resolve import NEVER_EXIT

COSTS = (0.1, 0.2, 0.3, 0.4, 0.5)
DRAFTING = Drafting(
    thresholds=(0.3, 0.4), max_drafts=5, prompt_lookup=7, draft_costs=(0.4, 0.8), verify_costs=COSTS, tuning={}
)
ALL_GIVEN = {"threshold": 0.5, "max_pending": 1, "compaction_threshold": 0.75}


@pytest.fixture
def bundle(tiny_bundle: Path) -> Bundle:
    """Each of its values differs from the program's default."""
    opened = open_bundle(tiny_bundle)
    values = {"thresholds": (0.6, 0.8), "min_layers": 3, "max_pending": 2, "compaction_threshold": 0.25}
    model = replace(opened.manifest.model, eos_token_ids=(3, 9))
    return replace(opened, manifest=replace(opened.manifest, **values, model=model, drafting=DRAFTING))


@pytest.mark.parametrize(
    ("options", "thresholds", "max_pending", "compaction_threshold", "drafts"),
    [
        ({"mode": "exit"}, [NEVER_EXIT, 0.8], 2, 0.25, None),
        ({**ALL_GIVEN, "mode": "exit", "min_layers": 0}, [0.5, 0.5], 1, 0.75, None),
        ({"mode": "full"}, [NEVER_EXIT, NEVER_EXIT], 2, 0.25, None),
        ({"mode": "lossless"}, [0.3, 0.4], NO_LIMIT, 0.0, DraftLimits(5, 7, (0.4, 0.8), COSTS)),
        (
            {**ALL_GIVEN, "mode": "lossless", "min_layers": 3, "prompt_lookup": 4},
            *([NEVER_EXIT, 0.5], NO_LIMIT, 0.75, DraftLimits(1, 4, (0.4, 0.8), COSTS)),
        ),
        ({"mode": "lossless", "temperature": 1}, [0.3, 0.4], NO_LIMIT, 0.0, DraftLimits(5, 7, (0.4, 0.8), COSTS)),
        (
            {"mode": "lossless", "temperature": 1, "compaction_threshold": 1.0},
            *([0.3, 0.4], NO_LIMIT, 1.0, DraftLimits(5, 7, (0.4, 0.8), COSTS)),
        ),
    ],
)
def test_a_value_is_the_given_one_else_the_bundle_s(
    bundle: Bundle,
    options: dict[str, Any],
    thresholds: list[float],
    max_pending: int,
    compaction_threshold: float,
    drafts: DraftLimits | None,
) -> None:
    config = GenerationConfig(**options)
    request = resolve(bundle, config, batched=True)
    assert request.config is config
    assert request.thresholds == thresholds
    assert request.max_pending == max_pending
    assert request.compaction_threshold == compaction_threshold
    assert request.drafts == drafts
    assert request.stop == {3, 9}


def test_without_a_drafting_record_the_exits_of_the_bundle_draft(bundle: Bundle) -> None:
    """But the one after 4 of 6 layers, which is not worth its cost."""
    untuned = replace(bundle, manifest=replace(bundle.manifest, drafting=None))
    request = resolve(untuned, GenerationConfig(mode="lossless", stop_token_ids=[4]), batched=True)
    limits = DraftLimits(6, 8, (0.1 + 2 / 6, 0.1 + 4 / 6), DEFAULT_VERIFY_COSTS)
    assert (request.thresholds, request.drafts, request.stop) == ([0.6, NEVER_EXIT], limits, {4})


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"top_k": 1}, "top_k is for a temperature above 0"),
        ({"stop_token_ids": [1000]}, "stop_token_ids holds token id 1000"),
    ],
)
def test_refused(bundle: Bundle, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(GenerationError, match=sentence):
        resolve(bundle, GenerationConfig(**options), batched=True)


def test_where_keys_and_values_are_propagated_nothing_pends(bundle: Bundle) -> None:
    propagating = replace(bundle, manifest=replace(bundle.manifest, kv_cache_strategy=PROPAGATE))
    check_exits(propagating, "exit", {"threshold": 0.5, "min_layers": 2})
    for name in ("max_pending", "compaction_threshold"):
        with pytest.raises(GenerationError, match=f"{name} is for an exact K/V cache"):
            check_exits(propagating, "exit", {name: 1}, batched=True)
    with pytest.raises(GenerationError, match="compaction_threshold is for a list of prompts"):
        check_exits(bundle, "exit", {"compaction_threshold": 1})
    with pytest.raises(GenerationError, match="mode 'lossless' needs an exact K/V cache"):
        resolve(propagating, GenerationConfig(mode="lossless"), batched=False)


def test_one_prompt_or_several(bundle: Bundle) -> None:
    several = ([[1], [2, 3]], ([1],), [np.array([1])], np.zeros((1, 3), int))
    assert [is_list_of_prompts(ids) for ids in several] == [True] * 4
    assert not any(is_list_of_prompts(ids) for ids in ([1, 2], np.zeros(3, int), [], "text", np.zeros((1, 1, 3), int)))
    prompt = check_prompt(bundle.manifest, np.array([3, 1], np.uint8))
    assert (prompt.dtype, prompt.tolist()) == (np.int64, [3, 1])
    assert check_prompt(bundle.manifest, [0, 47] * 128).tolist() == [0, 47] * 128
    for ids, sentence in [
        ([[1]], "the prompt must be a flat list"),
        ([1, 48], r"the prompt holds token id 48, outside the vocabulary 0\.\.47"),
        ([1, -1], "the prompt holds token id -1"),
        ([1] * 257, "the prompt has 257 tokens but the model's context holds 256"),
        ([], "the prompt is empty"),
    ]:
        with pytest.raises(GenerationError, match=sentence):
            check_prompt(bundle.manifest, ids)


def test_seeds_of_prompts() -> None:
    config = GenerationConfig(seed=[5, 6])
    assert list(seeds(config, 2)) == [5, 6]
    assert list(seeds(GenerationConfig(seed=7), 3)) == [7, 7, 7]
    assert single_seed(GenerationConfig(seed=7)) == 7
    with pytest.raises(GenerationError, match="there are 2 seeds for 3 prompts"):
        seeds(config, 3)
    with pytest.raises(GenerationError, match=r"seed must be a whole number, 0 or more, not \[5, 6\]"):
        single_seed(config)
