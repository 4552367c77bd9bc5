"""What lossless mode drafts, and when it verifies: its decoder on recorded continuations, without a model."""

import json
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from tide_export.bundle.manifest import Drafting
from tide_export.runtime.engine import Engine
from tide_export.runtime.native import call, int64s

FREE = (0.0,) * 5  # costs of verifying drafts
SHARES = {(1, 0): 0.17, (1, 1): 0.42, (2, 0): 0.42, (3, 0): 0.54, (2, 1): 0.62}  # by matched tokens and agreements
TOKEN_VALUE = 0.75  # steps of full depth that an accepted draft saves


@dataclass(frozen=True)
class Replayed:
    """`runs`: of each verifying run after the first token, how many tokens were pending, and how many were new."""

    drafted: int
    accepted: int
    lookup_drafted: int
    lookup_accepted: int
    exits: int
    runs: list[tuple[int, int]]


def replayed(prompt: list[int], full: list[int], early: list[int] | None = None, **drafting: Any) -> Replayed:
    """Replays `prompt` and the continuation `full`, of which every token exits to that of `early`; None: none does."""
    given = {"thresholds": [0.0], "max_drafts": 0, "prompt_lookup": 0, "verify_costs": FREE, "draft_costs": [0.0]}
    size = len(full)
    counts, exits, runs = np.zeros(4, np.int64), np.zeros(1, np.int64), np.zeros((size, 2), np.int64)
    scores, ids = np.full(size, 0.0 if early is None else 0.5, np.float32), int64s(prompt)
    if early is None:
        given["thresholds"] = [1.0]
    arrays = [scores, int64s(early or full), int64s(full)]
    call(
        "replay",
        json.dumps(given | drafting).encode(),
        *(ids.ctypes.data, len(ids), *(one.ctypes.data for one in arrays), size, 1),
        *(one.ctypes.data for one in (counts, exits, runs)),
    )
    return Replayed(*counts.tolist(), int(exits[0]), [tuple(run) for run in runs.tolist() if run[1]])


# --- early exits -----------------------------------------------------------------------------------------------------


def test_drafts_are_verified_when_enough_are_pending() -> None:
    text = list(range(1, 8))
    found = replayed([9], text, text, max_drafts=2)
    assert found.runs == [(2, 1), (2, 1)], "a first token, and three of each run"
    assert (found.drafted, found.accepted, found.exits) == (4, 4, 4)
    assert replayed([9], text, text, max_drafts=0).runs == [(0, 1)] * 6
    assert replayed([9], text, None, max_drafts=2).runs == [(0, 1)] * 6, "no token exits"


def test_no_draft_is_made_that_could_not_be_returned() -> None:
    for size in range(2, 9):
        text = list(range(1, size + 1))
        found = replayed([9], text, text, max_drafts=20)
        assert found.runs == [(size - 2, 1)]
        assert found.drafted == size - 2


def pending(early: int, count: int, draft_cost: float) -> list[int]:
    """How many early exits, all to the token `early`, are pending in each verifying run of a text of `count` 7s."""
    found = replayed([1], [7] * count, [early] * count, max_drafts=8, draft_costs=[draft_cost])
    return [before for before, _ in found.runs]


def test_early_exits_that_are_rejected_are_given_up_and_tried_again_later() -> None:
    """0.65 of a step may be lost at first, and 0.0025 of a step with each token."""
    made = pending(6, 600, draft_cost=0.4)
    assert made[:4] == [1, 1, 0, 0]
    assert sum(made[4:404]) == 3
    assert not any(pending(6, 600, draft_cost=0.9)), "which costs more than it is hoped to save"


def test_more_early_exits_are_pending_where_they_gain() -> None:
    made = pending(7, 80, draft_cost=0.4)
    assert made[:4] == [1, 1, 1, 2]
    assert sorted(made[:-1]) == made[:-1]
    assert made[-2] == 6
    assert pending(7, 80, draft_cost=0.0)[0] == 8


# --- prompt lookup ---------------------------------------------------------------------------------------------------


def following(prompt: list[int], first: int, count: int, **drafting: Any) -> list[int]:
    """What is drafted after a prompt and the first token, by trying which tokens are accepted."""
    found = list[int]()
    while len(found) < count:
        for token in range(10):
            done = replayed(prompt, [first, *found, token, 99], prompt_lookup=len(found) + 1, **drafting)
            if done.lookup_accepted > len(found):
                found.append(token)
                break
        else:
            return found
    return found


def test_the_token_after_the_longest_and_latest_match_is_drafted() -> None:
    assert following([1, 2, 3, 9, 2, 3, 8, 7, 7, 1, 2], 3, 3) == [9, 2, 3]  # after 1 2 3, though 2 3 is later
    assert following([1, 2, 5, 0, 1, 2, 6, 0, 1], 2, 2) == [6, 0]  # the latest of equals
    assert following([1, 2], 3, 1) == following([], 3, 1) == []
    assert following([1, 2, 3, 1, 2, 3], 1, 7) == [2, 3, 1, 2, 3, 1, 2], "a text that repeats itself goes on"
    assert following([5, 5], 5, 4) == [5] * 4


def searched(text: list[int]) -> tuple[int, tuple[int, int]] | None:
    """The token that follows, the length of the match, and how often in a row the same token followed before."""
    for n in (3, 2, 1):
        after = [text[end] for end in range(n, len(text)) if text[end - n : end] == text[-n:]]
        if after:
            others = [i for i, token in enumerate(reversed(after)) if token != after[-1]]
            return after[-1], (n, min((others[0] if others else len(after)) - 1, 2))
    return None


@pytest.mark.parametrize("seed", range(20))
def test_it_finds_what_a_search_through_the_text_finds(seed: int) -> None:
    """And drafts it where the share of such drafts that are accepted is known to pay."""
    rng, seen = np.random.default_rng(seed), set()
    for size in (3, 6, 10, 20, 40):
        for tokens in (2, 3, 8):
            text = rng.integers(0, tokens, size).tolist()
            match = searched(text)
            assert following(text[:-1], text[-1], 1) == ([] if match is None else [match[0]])
            if match is None or match[1] not in SHARES:
                continue
            seen.add(match[1])
            most = TOKEN_VALUE * SHARES[match[1]]
            for cost, drafts in ((most - 0.001, 1), (most + 0.001, 0)):
                done = replayed(text[:-1], [text[-1], 99, 98], prompt_lookup=1, verify_costs=(cost,) * 5)
                assert done.runs[0] == (0, 1 + drafts)
    assert len(seen) >= 3


def test_an_ngram_draft_costs_nothing_and_its_rejected_end_is_counted() -> None:
    found = replayed([1, 2, 3, 1], [2, 3, 1, 0, 9], prompt_lookup=4)
    assert found.runs[0] == (0, 4)  # 3 1 2 are drafted, for no more could be returned
    assert found == replace(found, drafted=3, accepted=2, lookup_drafted=3, lookup_accepted=2, exits=0)


@pytest.mark.parametrize(
    ("costs", "length"), [((0.1,) * 5, 4), ((0.1, 0.17, 0.3, 0.5, 1.0), 1), ((0.13,) * 5, 0), (FREE, 4)]
)
def test_an_ngram_draft_is_as_long_as_it_is_expected_to_pay(costs: tuple[float, ...], length: int) -> None:
    """After one token that matches 17 % of drafts are accepted, after two 42 %, after three 54 %."""
    found = replayed([1, 2, 3, 4, 5], [2, *[0] * 9], prompt_lookup=4, verify_costs=costs)
    assert found.runs[0] == (0, 1 + length)


def test_what_is_always_rejected_is_drafted_no_more() -> None:
    text = [5, 3, 8, 1, 6, 4, 7, 2, 5, *range(20, 40)]  # after each of the prompt's tokens comes another than there
    lengths = [new for _, new in replayed(list(range(10)), text, prompt_lookup=4, verify_costs=(0.1,) * 5).runs]
    assert lengths[0] == 5
    assert lengths[5:8] == [1, 1, 1]


@pytest.mark.parametrize(("max_drafts", "prompt_lookup"), [(0, 0), (1, 0), (4, 0), (4, 5), (16, 8)])
def test_a_verifying_run_is_bounded(max_drafts: int, prompt_lookup: int) -> None:
    """Every token exits, and the text repeats itself, so that there are as many drafts as there may be."""
    text = [5, 6, 7] * 30
    found = replayed(text, text, text, max_drafts=max_drafts, prompt_lookup=prompt_lookup)
    most = max(before + new for before, new in found.runs)
    assert most <= max_drafts + prompt_lookup + 1
    assert most == max_drafts + 1 or prompt_lookup
    assert found.accepted == found.drafted


@pytest.mark.parametrize("lookup", [0, 8])
def test_a_stop_token_ends_the_drafts(tiny_engine: Engine, lookup: int) -> None:
    """Of early exits and of prompt lookup: nothing after it is drafted, as nothing after it could be returned."""
    prompt, free = [11, 11, 11, 12] * 3, (0.0,) * 5
    engine = tiny_engine.drafting_as(Drafting((0.0, 0.0), 0 if lookup else 8, lookup, free[:2], free, {}))

    def like_the_prompt(ids: list[int], logits: np.ndarray) -> np.ndarray:
        return np.where(np.arange(48) == prompt[len(ids) % 4], 1.0, 0.0)

    options: dict[str, Any] = {"mode": "lossless", "max_new_tokens": 20, "logits_processor": like_the_prompt}
    whole = engine.generate(prompt, stop_token_ids=[], **options)
    assert whole.tokens == prompt + prompt[:8]
    stopped = engine.generate(prompt, stop_token_ids=[12], **options)
    assert stopped.tokens == prompt[:4]
    assert (stopped.stats.drafted, stopped.stats.accepted) == (3, 3), "one comes with the prompt"
