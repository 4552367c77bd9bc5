"""Drafts from earlier answers of a scheduler, and from a predicted text: the tokens are those of full depth, an owner's
text is nobody else's, memory is bounded, and what drafts saved is counted."""

from typing import Any

import pytest
from tiny_model import TinyModel

from tide_export.bundle.manifest import DEFAULT_VERIFY_COSTS
from tide_export.errors import GenerationError
from tide_export.runtime.engine import Engine, load
from tide_export.runtime.scheduler import Scheduler, SchedulerLimits

PROMPT = [5, 9, 2, 7, 11]
SAMPLED: dict[str, Any] = {"max_new_tokens": 40, "stop_token_ids": [], "temperature": 0.8, "seed": 3}
DRAFTED: dict[str, Any] = {"mode": "lossless", "threshold": 1.0, "prompt_lookup": 6, **SAMPLED}
ANSWER_BYTES = 76  # of a token


def scheduler_of(engine: Engine, answer_bytes: int = 1 << 20, slots: int = 1) -> Scheduler:
    return engine.scheduler(SchedulerLimits(slots=slots, answer_bytes=answer_bytes))


def test_a_repeated_answer_is_drafted_from_the_first(tiny_engine: Engine) -> None:
    full = tiny_engine.generate(PROMPT, mode="full", **SAMPLED).tokens
    scheduler = scheduler_of(tiny_engine)
    first, again = (scheduler.submit(PROMPT, **DRAFTED).result() for _ in range(2))
    assert first.tokens == again.tokens == full
    assert first.stats.answers_drafted == 0
    stats = again.stats
    assert stats.answers_accepted > 20
    assert stats.drafts["answers"] == (stats.answers_drafted, stats.answers_accepted)
    assert f"{stats.answers_accepted} of {stats.answers_drafted} from earlier answers" in stats.summary()
    assert stats.saved_seconds["answers"] > 0


@pytest.mark.parametrize("slots", [1, 4])
def test_tokens_are_full_depth_s_among_answers_to_other_requests(tiny_engine: Engine, slots: int) -> None:
    prompts = [PROMPT[: 1 + n % 5] for n in range(16)]
    full = [tiny_engine.generate(p, mode="full", **SAMPLED | {"seed": n}).tokens for n, p in enumerate(prompts)]
    scheduler = scheduler_of(tiny_engine, slots=slots)
    for _ in range(2):
        handles = [scheduler.submit(p, **DRAFTED | {"seed": n}) for n, p in enumerate(prompts)]
        assert [handle.result().tokens for handle in handles] == full
    assert sum(handle.stats.answers_accepted for handle in handles) > 0


@pytest.mark.parametrize("salts", [(None, "b"), ("a", None), ("a", "b")])
def test_no_request_drafts_from_an_answer_with_another_salt(tiny_engine: Engine, salts: tuple[str | None, ...]) -> None:
    scheduler = scheduler_of(tiny_engine)
    counts = [scheduler.submit(PROMPT, cache_salt=salt, **DRAFTED).result().stats for salt in (*salts, salts[1])]
    assert [stats.answers_drafted > 0 for stats in counts] == [False, False, True]


def test_old_answers_give_way_to_new_ones(tiny_engine: Engine) -> None:
    full = tiny_engine.generate(PROMPT, mode="full", **SAMPLED).tokens
    other = {**DRAFTED, "seed": 4}
    for tokens, kept in ((40, False), (400, True)):
        scheduler = scheduler_of(tiny_engine, tokens * ANSWER_BYTES)
        scheduler.submit(PROMPT, cache_salt="one", **DRAFTED).result()
        scheduler.submit(PROMPT[::-1], cache_salt="two", **other).result()
        again = scheduler.submit(PROMPT, cache_salt="one", **DRAFTED).result()
        assert again.tokens == full
        assert (again.stats.answers_accepted > 0) == kept


@pytest.mark.parametrize(("answer_bytes", "options"), [(0, {}), (1 << 20, {"prompt_lookup": 0}), (1, {})])
def test_without_memory_or_lookup_no_answer_is_drafted_from(
    tiny_engine: Engine, answer_bytes: int, options: dict[str, Any]
) -> None:
    scheduler = scheduler_of(tiny_engine, answer_bytes)
    for _ in range(2):
        assert scheduler.submit(PROMPT, **DRAFTED | options).result().stats.answers_drafted == 0
    with pytest.raises(GenerationError, match="answer_bytes must be a whole number, 0 or more, not -1"):
        SchedulerLimits(answer_bytes=-1)


def test_a_prediction_is_drafted_from_and_changes_no_token(tiny_engine: Engine) -> None:
    full = tiny_engine.generate(PROMPT, mode="full", **SAMPLED).tokens
    accepted = []
    for prediction in (None, full, [*full[:10], 1, 2, *full[12:]], full[::-1], [], [full[0]] * 200):
        out = tiny_engine.generate(PROMPT, prediction=prediction, **DRAFTED)
        assert out.tokens == full
        accepted.append(out.stats.lookup_accepted)
    assert accepted[1] > accepted[0] + 15
    assert accepted[2] > accepted[0] + 10
    assert tiny_engine.generate(PROMPT, mode="full", prediction=full, **SAMPLED).tokens == full


def test_a_prediction_is_tokens_of_the_vocabulary_and_fits_the_context(
    tiny: TinyModel, tiny_engine: Engine, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with pytest.raises(GenerationError, match="prediction holds token id 48, outside the vocabulary"):
        tiny_engine.generate(PROMPT, prediction=[3, 48], **DRAFTED)
    short = load(TinyModel(context=32).write(tmp_path_factory.mktemp("short") / "b"))
    with pytest.raises(GenerationError, match="prediction has 33 tokens, more than the context of 32: give the part"):
        short.generate([1], mode="lossless", prediction=[1] * 33)


def test_the_time_saved_is_what_steps_cost_less_what_they_did(tiny_engine: Engine) -> None:
    """Sources together save the tokens less the steps' costs, of which decoding took its seconds."""
    full = tiny_engine.generate(PROMPT, mode="full", **SAMPLED)
    assert set(full.stats.saved_seconds.values()) == {0.0}
    costs = DEFAULT_VERIFY_COSTS
    for prediction in (full.tokens, full.tokens[::-1]):
        stats = tiny_engine.generate(PROMPT, prediction=prediction, **DRAFTED | {"prompt_lookup": 1}).stats
        assert stats.drafted == stats.lookup_drafted > 0
        steps = 39 - stats.accepted  # each verifies at most one draft
        saved = (stats.accepted - costs[0] * stats.drafted) / (steps + costs[0] * stats.drafted)
        assert stats.saved_seconds["lookup"] == pytest.approx(saved * stats.decode_seconds)
