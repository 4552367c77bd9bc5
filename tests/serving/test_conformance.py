"""Requests of every mode get the tokens of `Engine.generate` from everything that answers requests.

`TIDE_CONFORMANCE=400 pytest tests/serving` asks 400 requests of up to 800 tokens, more than 100,000 in all.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conformance import REQUEST_SECONDS, Answer, Item, by_http, by_scheduler, check, expected, items_of, moving
from running_server import Running

from tide_export.runtime.engine import Engine, load

SAMPLED: dict[str, Any] = {"temperature": 0.8, "seed": 3}


@pytest.fixture(scope="module")
def engine(demo_bundle: Path) -> Engine:
    return load(demo_bundle, provider="cpu", threads=1)


@pytest.fixture(scope="module")
def asked(engine: Engine, demo_text_ids: list[int]) -> tuple[list[Item], list[Answer]]:
    items = items_of(engine, demo_text_ids)
    return items, expected(engine, items)


@pytest.fixture(scope="module")
def server(demo_bundle: Path) -> Iterator[Running]:
    running = Running(demo_bundle, waiting=64, request_seconds=REQUEST_SECONDS)
    yield running
    running.stop()


def test_the_requests_are_of_all_kinds(asked: tuple[list[Item], list[Answer]]) -> None:
    items, answers = asked
    assert {item.options["mode"] for item in items} == {"full", "exit", "lossless"}
    assert len(frozenset().union(*(answer.exits for answer in answers))) >= 3
    assert any(item.leaves_after for item in items)
    assert any(len(answer.text) > 40 for answer in answers)
    ended = [(answer.finish_reason, bool(item.stops)) for item, answer in zip(items, answers, strict=True)]
    assert {("stop", True), ("length", False)} <= set(ended)


def test_the_scheduler(engine: Engine, asked: tuple[list[Item], list[Answer]]) -> None:
    check(by_scheduler(engine), *asked, engine)


def test_the_http_server(server: Running, engine: Engine, asked: tuple[list[Item], list[Answer]]) -> None:
    server.http.timeout = REQUEST_SECONDS
    check(by_http(server.http, "demo"), *asked, engine)
    assert server.idle()


@pytest.mark.parametrize("options", [{}, SAMPLED, SAMPLED | {"top_p": 0.9}], ids=str)
def test_only_what_rounding_may_change_is_within_tolerance(
    engine: Engine, demo_text_ids: list[int], monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    item = Item(demo_text_ids[:5], {"mode": "full", "max_new_tokens": 8} | options)
    (right,) = expected(engine, [item])
    assert right.tokens is not None
    processor = moving(item, 3, right.tokens[3], 20.0, [])
    (other,) = expected(engine, [replace(item, options=item.options | {"logits_processor": processor})])
    assert other.tokens is not None
    assert (other.tokens[:3], other.tokens[3] != right.tokens[3]) == (right.tokens[:3], True)
    by_text = replace(other, tokens=None)
    for found in (other, by_text):
        with pytest.raises(AssertionError, match="1 of 1 requests differ"):
            check(lambda _, found=found: [found], [item], [right], engine)
    monkeypatch.setattr("tide_export.verify.parity.UNDECIDED_GAP", 20.0)
    for found in (other, by_text):
        check(lambda _, found=found: [found], [item], [right], engine)
    more = replace(other, tokens=[*other.tokens[:-1], right.tokens[0]])
    with pytest.raises(AssertionError, match="1 of 1 requests differ"):
        check(lambda _: [more], [item], [right], engine)
