"""Lossless mode for a list of prompts on segment networks: the full model's tokens, on the host and on a fake GPU."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from batch_prompts import PROMPTS, TEXT
from distribution import deviation, joint

from tide_export.bundle.manifest import DEFAULT_VERIFY_COSTS, Drafting
from tide_export.runtime.generation import Generation
from tide_export.runtime.decoding.sampling import Sampler
from tide_export.runtime.engine import Engine
from tide_export.runtime.segmented.backend import SegmentBackend
from tide_export.runtime.segmented.memory import SegmentBuffers
from tide_export.thresholds.resolve import NEVER_EXIT

NEW_TOKENS = 24
ALWAYS = 0.0
SETTINGS = [("mixed", 1, 0), ("mixed", 4, 6), ("always", 4, 0), ("always", 2, 6), ("never", 4, 20)]


@pytest.fixture(scope="module")
def full(engines) -> list[list[int]]:
    graph, _, _ = engines
    return [
        graph.generate(prompt, max_new_tokens=NEW_TOKENS, mode="full", stop_token_ids=[]).tokens for prompt in PROMPTS
    ]


@pytest.fixture(scope="module")
def eight(engines) -> Engine:
    """The networks for eight sequences, whose runs take fewer tokens of each than are verified at once."""
    _, networks, _ = engines
    backend = networks.backend
    info = replace(backend._info, max_batch_size=8, max_slot_tokens=2)
    wider = SegmentBackend(networks.manifest, info, backend.specs, backend._open_device, "cpu")
    return Engine(networks.bundle, wider)


def options_of(thresholds: list[float], exits: str, max_pending: int, lookup: int) -> dict:
    given = {"mixed": thresholds, "always": ALWAYS, "never": 1.0}[exits]
    options = {"mode": "lossless", "threshold": given, "max_pending": max_pending, "prompt_lookup": lookup}
    return options | {"stop_token_ids": []}


def tokens_of(generations: list[Generation]) -> list[list[int]]:
    return [one.tokens for one in generations]


def decisions(generations: list[Generation]) -> list[tuple]:
    """What each sequence got and how: tokens, layers, drafts."""
    found = []
    for one in generations:
        stats = one.stats
        drafts = (stats.drafted, stats.accepted, stats.lookup_drafted, stats.lookup_accepted)
        found.append(
            (one.tokens, one.finish_reason, stats.exit_layer, stats.layers_run, stats.layer_tokens_run, drafts)
        )
    return found


@pytest.mark.parametrize(("exits", "max_pending", "lookup"), SETTINGS)
def test_greedy_tokens_are_the_full_model_s(
    request, engines, eight: Engine, full: list[list[int]], exits: str, max_pending: int, lookup: int
) -> None:
    graph, networks, thresholds = engines
    options = options_of(thresholds, exits, max_pending, lookup)
    some = PROMPTS[1:4]  # as many as all engines have places for
    for share in (None, 0.5, 1.0):  # whoever comes along: the very decisions of the branched graph
        together = networks.generate(some, max_new_tokens=NEW_TOKENS, compaction_threshold=share, **options)
        assert decisions(together) == decisions(
            graph.generate(some, max_new_tokens=NEW_TOKENS, compaction_threshold=share, **options)
        )
    alone = [graph.generate(prompt, max_new_tokens=NEW_TOKENS, **options) for prompt in PROMPTS]
    assert decisions(together) == decisions(alone[1:4])
    assert tokens_of(networks.generate(PROMPTS, max_new_tokens=NEW_TOKENS, **options)) == full
    drafted, accepted = (sum(getattr(one.stats, name) for one in together) for name in ("drafted", "accepted"))
    assert accepted < drafted
    assert accepted > 0 or exits == "always", "exits that are always rejected are given up"
    assert (sum(one.stats.lookup_drafted for one in together) > 0) == bool(lookup)
    many = PROMPTS + PROMPTS[::-1]
    assert tokens_of(eight.generate(many, max_new_tokens=NEW_TOKENS, **options)) == full + full[::-1]


@pytest.mark.parametrize(("exits", "max_pending", "lookup"), SETTINGS[1:4])
def test_a_recording_device_gives_the_same(
    engines, fake_gpu: Engine, full: list[list[int]], exits: str, max_pending: int, lookup: int
) -> None:
    """Memory that is NaN until it is set, work done late, and a head that takes two tokens a run."""
    graph, _, thresholds = engines
    options = options_of(thresholds, exits, max_pending, lookup)
    assert tokens_of(fake_gpu.generate(PROMPTS, max_new_tokens=NEW_TOKENS, **options)) == full
    found = fake_gpu.generate(PROMPTS[1:4], max_new_tokens=NEW_TOKENS, **options)
    assert decisions(found) == decisions(graph.generate(PROMPTS[1:4], max_new_tokens=NEW_TOKENS, **options))


@pytest.mark.parametrize("places", range(1, 9))
def test_any_number_of_places(engines, eight: Engine, full: list[list[int]], places: int) -> None:
    _, _, thresholds = engines
    options = options_of(thresholds, "mixed", 3, 4)
    prompts = [PROMPTS[number % 5] for number in range(places)]
    found = eight.generate(prompts, max_new_tokens=9, **options)
    assert tokens_of(found) == [full[number % 5][:9] for number in range(places)]


def test_drawn_tokens_are_those_drawn_alone(engines, fake_gpu: Engine) -> None:
    graph, networks, thresholds = engines
    options = {"mode": "lossless", "threshold": thresholds, "temperature": 0.3, "max_pending": 3}
    options |= {"stop_token_ids": []}
    seeds = [3, 1, 4, 1, 5]
    alone = [
        graph.generate(ids, max_new_tokens=16, seed=seed, **options) for ids, seed in zip(PROMPTS, seeds, strict=True)
    ]
    for engine in (networks, fake_gpu):
        found = engine.generate(PROMPTS, max_new_tokens=16, seed=seeds, compaction_threshold=1.0, **options)
        assert decisions(found) == decisions(alone)
        assert tokens_of(engine.generate(PROMPTS, max_new_tokens=16, seed=seeds, **options)) == tokens_of(alone)
    drafted, accepted = (sum(getattr(one.stats, name) for one in alone) for name in ("drafted", "accepted"))
    assert accepted < drafted


def test_drawn_tokens_are_distributed_as_the_full_model_s(engines) -> None:
    """Of three sequences together: the first token comes from a verifying run, the second is drafted, the third is
    drafted behind a draft."""
    graph, networks, _ = engines
    prompt, sampler = TEXT[:5], {"temperature": 2.0, "top_k": 3}

    def logits_behind(tokens) -> np.ndarray:
        return graph.start([NEVER_EXIT, NEVER_EXIT]).step([*prompt, *tokens]).logits.copy()

    expected = joint(logits_behind, Sampler(**sampler), 3)
    drafting = networks.drafting_as(Drafting((ALWAYS, ALWAYS), 8, 0, (0.0, 0.0), DEFAULT_VERIFY_COSTS, {}))

    def sample(mode: str, draws: int) -> float:
        counts: Counter = Counter()
        for first in range(0, draws, 3):
            found = drafting.generate(
                [prompt] * 3,
                max_new_tokens=3,
                mode=mode,
                threshold=ALWAYS,
                min_layers=0,
                seed=[first, first + 1, first + 2],
                stop_token_ids=[],
                **sampler,
            )
            counts.update(tuple(one.tokens) for one in found)
        return deviation(counts, expected, draws)

    assert sample("lossless", 450) < 5
    assert sample("exit", 300) > 15, "what is not verified is another distribution, and this test would see it"


@pytest.mark.parametrize("lookup", [0, 7])
@pytest.mark.parametrize("share", [0.0, 1.0])
def test_a_stop_token_ends_its_own_sequence(engines, full: list[list[int]], share: float, lookup: int) -> None:
    _, networks, _ = engines
    stops = [full[1][4], full[3][6], full[4][7]]
    options = options_of([], "always", 5, lookup) | {"stop_token_ids": stops}
    found = networks.generate(PROMPTS, max_new_tokens=NEW_TOKENS, compaction_threshold=share, **options)
    for one, tokens in zip(found, full, strict=True):
        end = next((number for number, token in enumerate(tokens) if token in stops), None)
        assert one.tokens == (tokens if end is None else tokens[: end + 1])
        assert one.finish_reason == ("length" if end is None else "stop")
    assert len({len(one.tokens) for one in found}) > 2


@pytest.mark.parametrize("lookup", [0, 6])
def test_the_context_is_filled_to_its_last_place(engines, lookup: int) -> None:
    """What is verified ends with the buffers, so that it can hardly be padded, beside sequences that go on."""
    graph, networks, _ = engines
    for room in (0, 1, 3, 6):
        prompts = [[5, 6], [TEXT[i % 40] for i in range(256 - room)], [8]]
        alone = [graph.generate(prompt, max_new_tokens=12, mode="full", stop_token_ids=[]) for prompt in prompts]
        assert [one.finish_reason for one in alone] == ["length", "context", "length"]
        found = networks.generate(prompts, max_new_tokens=12, **options_of([], "always", 4, lookup))
        assert [(one.tokens, one.finish_reason) for one in found] == [(one.tokens, one.finish_reason) for one in alone]


@pytest.mark.parametrize("most", [1, 2, 3])
def test_not_one_token_more_than_asked_for(engines, full: list[list[int]], most: int) -> None:
    _, networks, thresholds = engines
    found = networks.generate(PROMPTS, max_new_tokens=most, **options_of(thresholds, "always", 4, 6))
    assert tokens_of(found) == [tokens[:most] for tokens in full]


def test_coming_along_saves_runs_of_the_last_segment(engines, monkeypatch) -> None:
    _, networks, thresholds = engines
    runs: list[int] = []
    launch = SegmentBuffers._launch
    monkeypatch.setattr(SegmentBuffers, "_launch", lambda self, k, *rest: (runs.append(k), launch(self, k, *rest)))
    deep = {}
    for share in (None, 1.0):
        networks.generate(
            PROMPTS[:3], max_new_tokens=NEW_TOKENS, compaction_threshold=share, **options_of(thresholds, "mixed", 2, 0)
        )
        deep[share] = runs.count(2)
        runs.clear()
    assert deep[None] < deep[1.0]


def test_no_more_is_drafted_than_the_buffers_and_a_run_hold(engines, fake_gpu: Engine, full: list[list[int]]) -> None:
    free = fake_gpu.drafting_as(Drafting((ALWAYS, ALWAYS), 40, 0, (0.0, 0.0), (0.0,) * 5, {}))
    found = free.generate(PROMPTS, max_new_tokens=NEW_TOKENS, mode="lossless", stop_token_ids=[])
    assert tokens_of(found) == full
