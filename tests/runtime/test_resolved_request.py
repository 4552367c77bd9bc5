"""What a `GenerationConfig` comes to for one bundle: every option as given, else as the bundle has it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bundles import with_manifest

from tide_export.bundle.manifest import DEFAULT_VERIFY_COSTS, Drafting
from tide_export.bundle.opened import open_bundle
from tide_export.errors import GenerationError
from tide_export.runtime.config import GenerationConfig
from tide_export.runtime.engine import Engine, load
from tide_export.runtime.request import is_list_of_prompts
from tide_export.thresholds.resolve import NEVER_EXIT

NO_LIMIT = -1
COSTS = (0.1, 0.2, 0.3, 0.4, 0.5)
DRAFTING = Drafting(
    thresholds=(0.3, 0.4), max_drafts=5, prompt_lookup=7, draft_costs=(0.4, 0.8), verify_costs=COSTS, tuning={}
)
ALL_GIVEN = {"threshold": 0.5, "max_pending": 1, "compaction_threshold": 0.75}
ASSUMED = {"costs": "assumed", "draft_costs": [pytest.approx(0.1 + 2 / 6), pytest.approx(0.1 + 4 / 6)]}
ASSUMED |= {"verify_costs": list(DEFAULT_VERIFY_COSTS), "drafter_cost": 0.1}
# Costs that a bundle holds are of another machine.
DRAFTS = {"max_drafts": 5, "prompt_lookup": 7, "drafter": 0} | ASSUMED


@pytest.fixture(scope="module")
def engine(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """Of a bundle each of whose values differs from the program's default."""
    values = {"thresholds": (0.6, 0.8), "min_layers": 3, "max_pending": 2, "compaction_threshold": 0.25}
    model = replace(open_bundle(tiny_bundle).manifest.model, eos_token_ids=(3, 9))
    folder = tmp_path_factory.mktemp("resolved")
    return load(with_manifest(tiny_bundle, folder, **values, model=model, drafting=DRAFTING), threads=1)


@pytest.mark.parametrize(
    ("options", "thresholds", "max_pending", "compaction_threshold", "drafts"),
    [
        ({"mode": "exit"}, [NEVER_EXIT, 0.8], 2, 0.25, None),
        ({**ALL_GIVEN, "mode": "exit", "min_layers": 0}, [0.5, 0.5], 1, 0.75, None),
        ({"mode": "full"}, [NEVER_EXIT, NEVER_EXIT], 2, 0.25, None),
        ({"mode": "lossless"}, [0.3, 0.4], NO_LIMIT, 0.0, DRAFTS),
        (
            {**ALL_GIVEN, "mode": "lossless", "min_layers": 3, "prompt_lookup": 4},
            *([NEVER_EXIT, 0.5], NO_LIMIT, 0.75, DRAFTS | {"max_drafts": 1, "prompt_lookup": 4}),
        ),
        ({"mode": "lossless", "temperature": 1}, [0.3, 0.4], NO_LIMIT, 0.0, DRAFTS),
        (
            {"mode": "lossless", "temperature": 1, "compaction_threshold": 1.0},
            *([0.3, 0.4], NO_LIMIT, 1.0, DRAFTS),
        ),
    ],
)
def test_a_value_is_the_given_one_else_the_bundle_s(
    engine: Engine,
    options: dict[str, Any],
    thresholds: list[float],
    max_pending: int,
    compaction_threshold: float,
    drafts: dict[str, Any] | None,
) -> None:
    resolved = engine.resolved(GenerationConfig(**options), prompts=2)
    assert resolved.pop("mode") == options["mode"]
    drafting = resolved.pop("drafting")
    limits = {"max_pending": max_pending, "compaction_threshold": compaction_threshold}
    assert resolved == limits | {"thresholds": thresholds}
    assert drafting == drafts


def test_without_a_drafting_record_the_exits_of_the_bundle_draft(engine: Engine, tmp_path: Path) -> None:
    """Whatever their scores: the runtime finds out where they pay."""
    untuned = load(with_manifest(engine.bundle.path, tmp_path, drafting=None), threads=1)
    resolved = untuned.resolved(GenerationConfig(mode="lossless", stop_token_ids=[4]), prompts=2)
    assert resolved["thresholds"] == [0.0, 0.0]
    assert (resolved["drafting"]["max_drafts"], resolved["drafting"]["prompt_lookup"]) == (6, 8)
    assert resolved["drafting"].items() >= ASSUMED.items()


def test_costs_that_are_given_are_used(engine: Engine) -> None:
    drafting = engine.drafting_as(DRAFTING).resolved(GenerationConfig(mode="lossless"))["drafting"]
    assert (drafting["costs"], drafting["draft_costs"], drafting["verify_costs"]) == ("given", [0.4, 0.8], list(COSTS))
    with pytest.raises(GenerationError, match=r"drafting\.verify_costs must have five values"):
        engine.drafting_as(replace(DRAFTING, verify_costs=COSTS[:4])).resolved(GenerationConfig(mode="lossless"))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"top_k": 1}, "top_k is for a temperature above 0"),
        ({"stop_token_ids": [1000]}, "stop_token_ids holds token id 1000"),
    ],
)
def test_refused(engine: Engine, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(GenerationError, match=sentence):
        engine.resolved(GenerationConfig(**options), prompts=2)


def test_compaction_is_for_several_prompts(engine: Engine) -> None:
    with pytest.raises(GenerationError, match="compaction_threshold is for a list of prompts"):
        engine.resolved(GenerationConfig(mode="exit", compaction_threshold=1))


def test_one_prompt_or_several() -> None:
    several = ([[1], [2, 3]], ([1],), [np.array([1])], np.zeros((1, 3), int))
    assert [is_list_of_prompts(ids) for ids in several] == [True] * 4
    assert not any(is_list_of_prompts(ids) for ids in ([1, 2], np.zeros(3, int), [], "text", np.zeros((1, 1, 3), int)))


@pytest.mark.parametrize(
    ("ids", "sentence"),
    [
        ([[[1]]], "prompt 1 must be a flat list"),
        ([1, 48], r"the prompt holds token id 48, outside the vocabulary 0\.\.47"),
        ([1, -1], "the prompt holds token id -1"),
        ([1] * 257, "the prompt has 257 tokens but the model's context holds 256"),
        ([], "the prompt is empty"),
    ],
)
def test_prompts_that_are_refused(engine: Engine, ids: Any, sentence: str) -> None:
    with pytest.raises(GenerationError, match=sentence):
        engine.generate(ids, max_new_tokens=1)


def test_prompts_of_any_type(engine: Engine) -> None:
    options = {"max_new_tokens": 1, "mode": "full"}
    assert engine.generate(np.array([3, 1], np.uint8), **options).tokens == engine.generate([3, 1], **options).tokens
    assert len(engine.generate([0, 47] * 127, **options).tokens) == 1


def test_seeds_of_prompts(engine: Engine) -> None:
    options: dict[str, Any] = {"temperature": 1.5, "max_new_tokens": 8, "stop_token_ids": []}
    alone = [engine.generate([5, 1], seed=seed, **options).tokens for seed in (5, 6)]
    assert alone[0] != alone[1]
    with pytest.raises(GenerationError, match=r"seed must be a whole number, 0 or more, not \[5, 6\]"):
        engine.generate([1], seed=[5, 6], **options)
