"""Lossless mode returns the full model's tokens, whatever was drafted: greedy, and sampled with the same seed, up to
every kind of end."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import tiers
from distribution import deviation, joint
from tiny_model import TinyModel

from tide_export.bundle.manifest import DEFAULT_VERIFY_COSTS, Drafting
from tide_export.errors import GenerationError
from tide_export.runtime.engine import Engine, load
from tide_export.runtime.stats import NO_LAYER
from tide_export.thresholds.resolve import NEVER_EXIT

ALWAYS, NEVER = 0.0, 1.0
FREE = (0.0,) * 5  # costs of verifying drafts
SMALL = TinyModel(vocabulary=5, seed=3)


@pytest.fixture(scope="module")
def small_engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return load(SMALL.write(tmp_path_factory.mktemp("small") / "b"))


def random_ids(count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 48, count).tolist()


@pytest.mark.parametrize("thresholds", [[ALWAYS, ALWAYS], [NEVER, ALWAYS], [0.5, 0.65], [0.6, NEVER], [NEVER, NEVER]])
@pytest.mark.parametrize("max_pending", [0, 1, 4, 100])
@pytest.mark.parametrize("prompt", [1, 9])
def test_greedy_tokens_are_the_full_model_s(
    tiny: TinyModel, tiny_engine: Engine, thresholds: list[float], max_pending: int, prompt: int
) -> None:
    ids = random_ids(prompt, seed=prompt)
    expected, _ = tiny.reference_greedy(ids, [NEVER_EXIT, NEVER_EXIT], 40)
    drafting = tiny_engine.drafting_as(Drafting(tuple(thresholds), max_pending, 0, (0.0, 0.0), FREE, {}))
    out = drafting.generate(ids, max_new_tokens=40, mode="lossless")
    assert out.tokens == expected
    assert out.finish_reason == "length"
    assert out.stats.total_tokens == 40
    assert (out.stats.drafted > 0) == (max_pending > 0 and thresholds != [NEVER, NEVER])


@pytest.mark.parametrize("thresholds", [[ALWAYS, ALWAYS], [0.5, 0.65], [NEVER, NEVER]])
@pytest.mark.parametrize("max_pending", [0, 3])
@pytest.mark.parametrize("lookup", [1, 3, 12])
@pytest.mark.parametrize("prompt", [1, 9])
def test_greedy_tokens_are_the_full_model_s_with_prompt_lookup_drafts(
    tiny: TinyModel, tiny_engine: Engine, thresholds: list[float], max_pending: int, lookup: int, prompt: int
) -> None:
    ids = (random_ids(3, seed=prompt) * 3)[:prompt]  # a text that has been there before
    expected, _ = tiny.reference_greedy(ids, [NEVER_EXIT, NEVER_EXIT], 40)
    out = tiny_engine.generate(
        ids, max_new_tokens=40, mode="lossless", threshold=thresholds, max_pending=max_pending, prompt_lookup=lookup
    )
    assert out.tokens == expected
    stats = out.stats
    assert stats.lookup_drafted > 0
    assert stats.exit_layer.count(NO_LAYER) == stats.lookup_accepted
    assert (stats.drafted > stats.lookup_drafted) == (max_pending > 0 and thresholds != [NEVER, NEVER])
    assert stats.total_exited + stats.lookup_accepted == stats.accepted
    assert stats.remaining_tokens == 40 - stats.accepted
    assert f"{stats.lookup_accepted} of {stats.lookup_drafted} by prompt lookup" in stats.summary()


def test_looking_up_saves_passes_where_the_text_repeats_itself(tiny_engine: Engine) -> None:
    """A greedy model of 48 tokens soon runs in circles, and every full circle is known."""
    options = {"mode": "lossless", "threshold": NEVER, "stop_token_ids": []}
    without = tiny_engine.generate([1, 2, 3], max_new_tokens=200, prompt_lookup=0, **options)
    with_ = tiny_engine.generate([1, 2, 3], max_new_tokens=200, prompt_lookup=8, **options)
    assert with_.tokens == without.tokens
    assert with_.stats.lookup_accepted > 100
    assert sum(with_.stats.layers_run) < 0.5 * sum(without.stats.layers_run)


def test_looking_up_is_for_lossless_mode_alone(tiny_engine: Engine) -> None:
    with pytest.raises(GenerationError, match="prompt_lookup is for mode 'lossless', not 'exit'"):
        tiny_engine.generate([1], mode="exit", prompt_lookup=4)
    with pytest.raises(GenerationError, match="prompt_lookup must be a whole number, 0 or more, not -1"):
        tiny_engine.generate([1], mode="lossless", prompt_lookup=-1)


def test_drafts_stand_and_fall_and_are_counted(small_engine: Engine) -> None:
    options = {"threshold": ALWAYS, "max_pending": 4, "prompt_lookup": 0, "temperature": 0.3}
    drawn = (small_engine.generate([1, 4, 2], max_new_tokens=60, mode="lossless", seed=n, **options) for n in range(99))
    stats = next(one.stats for one in drawn if one.stats.accepted)
    assert 0 < stats.accepted < stats.drafted  # or the test says nothing about one of the two
    assert stats.acceptance_rate == stats.accepted / stats.drafted
    assert stats.accepted == stats.total_exited  # a confirmed draft counts where it was drafted
    passes = sum(stats.layers_run)
    assert passes == 2 * stats.drafted + 6 * (stats.total_tokens - stats.accepted)
    assert f"drafts: {stats.accepted} of {stats.drafted} accepted" in stats.summary()
    positions = 3 + 60 - 1 + (stats.drafted - stats.accepted)
    assert stats.layer_tokens_run == 6 * positions


def test_what_drafts_lose_is_bounded_over_all_requests(tiny_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine lets them lose half a step, 0.15 of a step more a request and 0.0025 of a step more a token."""
    drafting = Drafting((ALWAYS, NEVER), 4, 0, draft_costs=(0.3, 0.9), verify_costs=DEFAULT_VERIFY_COSTS, tuning={})
    count, tokens = 12, 40

    def lost(engine: Engine) -> float:
        """Steps, of requests one after the other."""
        done = [
            engine.generate([n, 1], max_new_tokens=tokens, mode="lossless", temperature=1.5, seed=n, stop_token_ids=[])
            for n in range(count)
        ]
        drafted, accepted = (sum(getattr(one.stats, name) for one in done) for name in ("drafted", "accepted"))
        return drafted * (0.3 + 0.13 * 4 / 6) - accepted  # 4 of 6 layers verify

    each_anew = lost(tiny_engine.drafting_as(drafting))
    monkeypatch.delenv("TIDE_DRAFT_COSTS")
    together = lost(tiny_engine.drafting_as(drafting))
    allowed = 0.5 + count * (0.15 + 0.0025 * tokens)
    assert together < allowed + 0.5 < each_anew


def test_full_depth_everywhere_means_no_drafts_in_the_statistics(tiny_engine: Engine) -> None:
    stats = tiny_engine.generate([1, 2], max_new_tokens=10, mode="full").stats
    assert (stats.drafted, stats.accepted, stats.acceptance_rate) == (0, 0, 0.0)
    assert "drafts" not in stats.summary()


@pytest.mark.parametrize("most", [1, 2, 3, 7])
def test_not_one_token_more_than_asked_for(tiny: TinyModel, tiny_engine: Engine, most: int) -> None:
    out = tiny_engine.generate([3, 1, 4], max_new_tokens=most, mode="lossless", threshold=ALWAYS, max_pending=16)
    assert out.tokens == tiny.reference_greedy([3, 1, 4], [NEVER_EXIT, NEVER_EXIT], most)[0]


@pytest.mark.parametrize("lookup", [0, 7])
@pytest.mark.parametrize("number", range(1, 12))
def test_a_stop_token_ends_it_also_in_the_middle_of_a_block(
    tiny: TinyModel, tiny_engine: Engine, number: int, lookup: int
) -> None:
    expected, _ = tiny.reference_greedy([7, 8], [NEVER_EXIT, NEVER_EXIT], 30)
    stop = expected[number]
    options = {"threshold": ALWAYS, "max_pending": 5, "prompt_lookup": lookup, "stop_token_ids": [stop]}
    out = tiny_engine.generate([7, 8], max_new_tokens=30, mode="lossless", **options)
    assert out.tokens == expected[: expected.index(stop) + 1]
    assert out.finish_reason == "stop"


@pytest.mark.parametrize("lookup", [0, 7])
@pytest.mark.parametrize("room", [0, 1, 2, 3, 4, 5, 20, 21, 22, 23])
def test_the_context_is_filled_to_its_last_place(tiny: TinyModel, tmp_path: Path, room: int, lookup: int) -> None:
    short = TinyModel(context=10 + room)
    engine = load(short.write(tmp_path / "b"))
    full = engine.generate([1, 2, 3], max_new_tokens=100, mode="full")
    assert full.finish_reason == "context"
    out = engine.generate(
        [1, 2, 3], max_new_tokens=100, mode="lossless", threshold=ALWAYS, max_pending=4, prompt_lookup=lookup
    )
    assert (out.tokens, out.finish_reason) == (full.tokens, "context")


def test_a_stream_can_be_left_at_any_token(tiny: TinyModel, tiny_engine: Engine) -> None:
    expected, _ = tiny.reference_greedy([5], [NEVER_EXIT, NEVER_EXIT], 12)
    for count in range(1, 12):
        stream = tiny_engine.stream(
            [5], max_new_tokens=12, mode="lossless", threshold=ALWAYS, max_pending=5, prompt_lookup=2
        )
        assert [next(stream) for _ in range(count)] == expected[:count]
        assert stream.finish_reason is None


PROMPT, LENGTH = [1, 4, 2, 1], 3


@pytest.mark.parametrize(
    ("temperature", "top_p", "lookup"),
    tiers.exhaustive_beyond(2, [(1.5, 0.8, 0), (1.0, 1.0, 8), (1.0, 1.0, 0), (1.5, 0.8, 8)]),
)
def test_sampled_tokens_are_distributed_as_the_full_model_s(
    small_engine: Engine, temperature: float, top_p: float, lookup: int
) -> None:
    """The first token comes from a verifying run, the second is drafted, the third is drafted after a draft: by early
    exits or, after a 1, 2 or 4, which the prompt has, from the text."""
    expected = joint(
        lambda tokens: SMALL.reference([*PROMPT, *tokens], [NEVER_EXIT, NEVER_EXIT])[0][-1],
        {"temperature": temperature, "top_p": top_p},
        LENGTH,
    )
    engine = small_engine.drafting_as(Drafting((ALWAYS, ALWAYS), 0 if lookup else 8, lookup, FREE[:2], FREE, {}))
    drafted = Counter[str]()

    def sample(mode: str, draws: int) -> float:
        counts: Counter = Counter()
        for seed in range(draws):
            out = engine.generate(
                PROMPT, max_new_tokens=LENGTH, mode=mode, threshold=ALWAYS, min_layers=0,
                temperature=temperature, top_p=top_p, seed=seed,
            )  # fmt: skip
            counts[tuple(out.tokens)] += 1
            drafted["exits"] += out.stats.drafted - out.stats.lookup_drafted
            drafted["prompt lookup"] += out.stats.lookup_drafted
        assert set(counts) <= set(expected) or mode != "lossless"
        return deviation(counts, expected, draws)

    assert sample("lossless", 1200) < 5
    assert (drafted["exits"] > 250) != bool(lookup)
    assert (drafted["prompt lookup"] > 250) == bool(lookup)
    assert sample("exit", 300) > 20, "what is not verified is another distribution, and this test would see it"


@pytest.mark.parametrize("lookup", [0, 8])
@pytest.mark.parametrize(("temperature", "top_k", "top_p"), [(0.8, 0, 1.0), (1.5, 3, 1.0), (1.0, 0, 0.8)])
def test_sampled_tokens_are_those_of_full_depth_with_the_same_seed(
    small_engine: Engine, lookup: int, temperature: float, top_k: int, top_p: float
) -> None:
    engine = small_engine.drafting_as(Drafting((ALWAYS, ALWAYS), 3, lookup, FREE[:2], FREE, {}))
    accepted = drafted = 0
    for seed in range(16):
        options = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed, "max_new_tokens": 40}
        out = engine.generate([1, 2, 3, 1, 2], mode="lossless", **options)
        assert out.tokens == engine.generate([1, 2, 3, 1, 2], mode="full", **options).tokens
        accepted, drafted = accepted + out.stats.accepted, drafted + out.stats.drafted
    assert 0 < accepted < drafted


def test_the_same_seed_gives_the_same_tokens(small_engine: Engine) -> None:
    def draw(seed: int) -> list[int]:
        return small_engine.generate(
            PROMPT, max_new_tokens=40, mode="lossless", threshold=ALWAYS, temperature=1.0, seed=seed
        ).tokens

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)


def test_the_bundle_says_how_to_draft(tmp_path: Path) -> None:
    tiny = TinyModel()
    never = Drafting((1.0, 1.0), 3, 0, (0.4, 0.8), DEFAULT_VERIFY_COSTS, {})
    assert (
        not load(tiny.write(tmp_path / "never", drafting=never))
        .generate([1], max_new_tokens=9, mode="lossless")
        .stats.drafted
    )
    late = Drafting((1.0, 0.0), 3, 5, (0.4, 0.8), DEFAULT_VERIFY_COSTS, {})
    # min_layers guards the quality of exits; drafts are verified.
    stats = (
        load(tiny.write(tmp_path / "late", drafting=late, min_layers=5))
        .generate([1], max_new_tokens=30, mode="lossless")
        .stats
    )
    assert stats.drafted
    assert stats.exits_per_layer[2] == 0
    assert stats.lookup_drafted


def test_other_modes_are_refused(tiny_engine: Engine) -> None:
    with pytest.raises(GenerationError, match="'full', 'exit' or 'lossless', not 'fast'"):
        tiny_engine.generate([1], mode="fast")
