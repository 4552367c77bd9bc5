"""Lossless mode drafts for several sequences where that pays by the costs of all their tokens, and not elsewhere."""

from pathlib import Path
from typing import Any

import pytest
from drafters import drafting_copy

from tide_export.bundle.manifest import Drafting
from tide_export.runtime.engine import Engine, load
from tide_export.runtime.generation import Generation
from tide_export.runtime.scheduler import SchedulerLimits

SLOTS, NEW_TOKENS = 8, 40
CHEAP = (0.01, 0.02, 0.04, 0.08, 0.16)
STEEP = (0.02, 0.04, 0.08, 2.0, 4.0)  # cheap for one sequence; beside seven others a token costs what it saves


@pytest.fixture(scope="module")
def engine(demo_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return load(drafting_copy(demo_bundle, tmp_path_factory.mktemp("demo")), threads=1)


@pytest.fixture(scope="module")
def prompts(demo_text_ids: list[int]) -> list[list[int]]:
    return [demo_text_ids[40 * number : 40 * number + 12 + number] for number in range(SLOTS)]


def drafted(
    engine: Engine, prompts: list[list[int]], costs: tuple[float, ...], drafter_cost: float, **options: Any
) -> tuple[int, int]:
    """Drafts of the drafter and n-grams, of a list and, which must be as many, of a scheduler with as many slots."""
    checkpoints = len(engine.manifest.checkpoints)
    drafting = Drafting((1.0,) * checkpoints, 0, 0, (1.0,) * checkpoints, costs, {}, 4, drafter_cost)
    tuned = engine.drafting_as(drafting)
    options = {"temperature": 0.8, "max_new_tokens": NEW_TOKENS, "stop_token_ids": [], **options}
    seeds = list(range(len(prompts)))
    full = engine.generate(prompts, mode="full", seed=seeds, **_without_drafts(options))
    made = tuned.generate(prompts, mode="lossless", seed=seeds, **options)
    scheduler = tuned.scheduler(SchedulerLimits(slots=len(prompts)))
    handles = [
        scheduler.submit(prompt, mode="lossless", seed=seed, **options)
        for prompt, seed in zip(prompts, seeds, strict=True)
    ]
    served = [handle.result() for handle in handles]
    assert [one.tokens for one in made] == [one.tokens for one in served] == [one.tokens for one in full]
    lists, servers = counts(made), counts(served)
    assert [value > 0 for value in lists] == [value > 0 for value in servers]
    return lists


def _without_drafts(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name not in ("drafter", "prompt_lookup")}


def counts(made: list[Generation]) -> tuple[int, int]:
    return sum(one.stats.learned_drafted for one in made), sum(one.stats.lookup_drafted for one in made)


def test_where_it_pays_it_is_drafted(engine: Engine, prompts: list[list[int]]) -> None:
    learned, _ = drafted(engine, prompts, CHEAP, 0.01)
    assert learned > SLOTS
    _, lookup = drafted(engine, prompts, CHEAP, 0.01, drafter=0, prompt_lookup=6)
    assert lookup > SLOTS


def test_what_pays_for_one_and_not_for_many_is_not_drafted_for_many(engine: Engine, prompts: list[list[int]]) -> None:
    """From the first token on: also that one knows of the others."""
    assert drafted(engine, prompts[:1], STEEP, 0.01)[0] > 0
    assert drafted(engine, prompts, STEEP, 0.01, prompt_lookup=6) == (0, 0)


def test_a_drafter_s_run_is_paid_by_those_that_share_it(engine: Engine, prompts: list[list[int]]) -> None:
    """It costs more than one sequence's draft could save, and less than those of eight do."""
    assert drafted(engine, prompts[:1], CHEAP, 0.8) == (0, 0)
    assert drafted(engine, prompts, CHEAP, 0.2)[0] > 0
    assert drafted(engine, prompts, CHEAP, 3.0) == (0, 0)


def test_drafts_that_fail_are_bounded(engine: Engine, prompts: list[list[int]]) -> None:
    """The drafter says that nine of ten are accepted, and hardly any is: at most half a step of each sequence, and a
    hundredth of a step with each token, beside what was drafted before that was known."""
    costs = (0.04, 0.08, 0.16, 0.32, 0.64)  # 0.25 of a sequence's share in a step, for each draft
    learned, _ = drafted(engine, prompts, costs, 0.0)
    assert SLOTS <= learned <= (0.5 * SLOTS + 0.01 * SLOTS * NEW_TOKENS) / 0.25 + 2 * SLOTS


def test_old_tokens_are_run_over_where_that_pays_in_the_tokens_to_come(
    engine: Engine, demo_text_ids: list[int]
) -> None:
    """A drafter that never ran has the whole prompt before it."""
    costs, drafter_cost = (0.1, 0.2, 0.4, 0.8, 1.6), 0.5
    assert drafted(engine, [demo_text_ids[:4]], costs, drafter_cost)[0] > 0
    assert drafted(engine, [demo_text_ids[:200]], costs, drafter_cost) == (0, 0)
    assert drafted(engine, [demo_text_ids[:200]], costs, 0.01)[0] > 0
