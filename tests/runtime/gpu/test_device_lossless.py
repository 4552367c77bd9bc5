"""Lossless mode for lists, on the graph's networks for batches and on segment networks, on the host and on the stand-in
GPU: the full model's tokens, whoever else drafts, verifies and is rewound meanwhile, and the drafts of the graph."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from bundles import with_manifest
from caller_networks import CallersNetworks, callers_engine
from fake_cudart import FakeCudart
from generations import LOSSLESS, NEW_TOKENS, PROMPTS, alone, facts, together, tokens_of
from judge import TEXT
from tiny_configs import CONTEXT
from tiny_engines import TinyLlama

from tide_export.bundle.manifest import DEFAULT_VERIFY_COSTS, Drafting
from tide_export.bundle.opened import open_bundle
from tide_export.names.networks import segment_name
from tide_export.runtime.engine import Engine, open_engine

ALWAYS = 0.0
CHEAP = Drafting((ALWAYS, ALWAYS), 4, 8, (0.05, 0.1), DEFAULT_VERIFY_COSTS)  # so that much is drafted
THREE = PROMPTS[1:4]  # as many as there are slots


@pytest.fixture(scope="module")
def full(graph: Engine) -> list[list[int]]:
    return tokens_of(alone(graph, mode="full"))


@pytest.fixture(scope="module")
def eight(tiny_llama: TinyLlama, device: FakeCudart | None, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """The networks for eight sequences, whose runs take fewer tokens of each than are verified at once."""
    info = open_bundle(tiny_llama.exact).manifest.networks
    assert info is not None
    wider = replace(info, max_batch_size=8, max_slot_tokens=2)
    bundle = open_bundle(with_manifest(tiny_llama.exact, tmp_path_factory.mktemp("eight"), networks=wider))
    return callers_engine(bundle, device)[0] if device else open_engine(bundle, "cpu-networks", threads=1)


Options = Callable[[str, int, int], dict[str, Any]]


@pytest.fixture
def options(thresholds: list[float]) -> Options:
    """By which drafts exit, how many may be pending, and the tokens of a lookup."""
    return lambda exits, max_pending, lookup: {
        **LOSSLESS,
        "threshold": {"mixed": thresholds, "always": ALWAYS, "never": 1.0}[exits],
        "max_pending": max_pending,
        "prompt_lookup": lookup,
    }


EXITS = pytest.mark.parametrize(
    ("exits", "max_pending", "lookup"),
    [("mixed", 1, 0), ("mixed", 4, 6), ("always", 4, 0), ("always", 2, 6), ("never", 4, 20)],
)


@EXITS
def test_greedy_tokens_are_the_full_model_s(
    graph: Engine,
    batching: Engine,
    full: list[list[int]],
    options: Options,
    exits: str,
    max_pending: int,
    lookup: int,
) -> None:
    given = options(exits, max_pending, lookup)
    graph, batching = (engine.drafting_as(CHEAP) for engine in (graph, batching))
    for share in (None, 0.5, 1.0):  # whoever comes along: the very decisions of the graph
        found, expected = (together(one, THREE, compaction_threshold=share, **given) for one in (batching, graph))
        assert [facts(one) for one in found] == [facts(one) for one in expected]
    assert tokens_of(found) == tokens_of(alone(graph, THREE, **given))
    drafted, accepted = (sum(getattr(one.stats, name) for one in found) for name in ("drafted", "accepted"))
    assert accepted < drafted
    assert accepted > 0 or exits == "always", "exits that are always rejected are given up"
    assert (sum(one.stats.lookup_drafted for one in found) > 0) == bool(lookup)
    assert tokens_of(together(batching, **given)) == full


@pytest.mark.parametrize("slots", range(1, 9))
def test_any_number_of_slots(eight: Engine, full: list[list[int]], options: Options, slots: int) -> None:
    prompts = [PROMPTS[number % 5] for number in range(slots)]
    found = together(eight, prompts, **options("mixed", 3, 4) | {"max_new_tokens": 9})
    assert tokens_of(found) == [full[number % 5][:9] for number in range(slots)]


@EXITS
def test_more_tokens_are_verified_than_a_run_takes_of_each(
    eight: Engine, full: list[list[int]], options: Options, exits: str, max_pending: int, lookup: int
) -> None:
    found = together(eight, PROMPTS + PROMPTS[::-1], **options(exits, max_pending, lookup))
    assert tokens_of(found) == full + full[::-1]


def test_drawn_tokens_are_those_drawn_alone_and_at_full_depth(
    graph: Engine, batching: Engine, thresholds: list[float]
) -> None:
    drawn = {"temperature": 0.3, "top_k": 2, "seed": [3, 1, 4, 1, 5], "max_new_tokens": 16}
    given = LOSSLESS | drawn | {"threshold": thresholds, "max_pending": 3}
    expected = alone(graph, **given)
    found = together(batching, compaction_threshold=1.0, **given)
    assert tokens_of(found) == tokens_of(expected)
    assert tokens_of(together(batching, **given)) == tokens_of(expected), "also where they are verified with others"
    assert tokens_of(expected) == tokens_of(together(batching, mode="full", **drawn))
    drafted, accepted = (sum(getattr(one.stats, name) for one in found) for name in ("drafted", "accepted"))
    assert 0 < accepted < drafted


@pytest.mark.parametrize("lookup", [0, 7])
@pytest.mark.parametrize("share", [0.0, 1.0])
def test_a_stop_token_ends_its_own_sequence(
    batching: Engine, full: list[list[int]], options: Options, share: float, lookup: int
) -> None:
    stops = [full[1][4], full[3][6], full[4][7]]
    given = options("always", 5, lookup) | {"stop_token_ids": stops}
    for one, tokens in zip(together(batching, compaction_threshold=share, **given), full, strict=True):
        end = next((number for number, token in enumerate(tokens) if token in stops), None)
        assert one.tokens == (tokens if end is None else tokens[: end + 1])
        assert one.finish_reason == ("length" if end is None else "stop")


@pytest.mark.parametrize("lookup", [0, 6])
def test_the_context_is_filled_to_its_last_place(
    graph: Engine, batching: Engine, options: Options, lookup: int
) -> None:
    """What is verified ends with the buffers, so that it can hardly be padded, beside sequences that go on."""
    for room in (0, 1, 3, 6):
        prompts = [[5, 6], [TEXT[i % 40] for i in range(CONTEXT - room)], [8]]
        expected = alone(graph, prompts, mode="full", max_new_tokens=12)
        assert [one.finish_reason for one in expected] == ["length", "context", "length"]
        found = together(batching, prompts, **options("always", 4, lookup) | {"max_new_tokens": 12})
        assert [(one.tokens, one.finish_reason) for one in found] == [
            (one.tokens, one.finish_reason) for one in expected
        ]


@pytest.mark.parametrize("most", [1, 2, 3])
def test_not_one_token_more_than_asked_for(
    batching: Engine, full: list[list[int]], options: Options, most: int
) -> None:
    found = together(batching, **options("always", 4, 6) | {"max_new_tokens": most})
    assert tokens_of(found) == [tokens[:most] for tokens in full]


def test_coming_along_saves_runs_of_the_last_segment(on_host: tuple[Engine, CallersNetworks], options: Options) -> None:
    """Where the host decides: every run is one that is needed."""
    engine, networks = on_host
    deep = {}
    for share in (None, 1.0):
        networks.runs.clear()
        together(engine, THREE, compaction_threshold=share, **options("mixed", 2, 0))
        deep[share] = sum(name == segment_name(2) for name, _, _ in networks.runs)
    assert deep[None] < deep[1.0]


def test_no_more_is_drafted_than_the_buffers_and_a_run_hold(batching: Engine, full: list[list[int]]) -> None:
    free = batching.drafting_as(Drafting((ALWAYS, ALWAYS), 40, 0, (0.0, 0.0), (0.0,) * len(DEFAULT_VERIFY_COSTS), {}))
    assert tokens_of(together(free, max_new_tokens=NEW_TOKENS, **LOSSLESS)) == full
