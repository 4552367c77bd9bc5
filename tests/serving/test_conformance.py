"""Requests of every mode get the tokens of `Engine.generate` from everything that answers requests.

`TIDE_CONFORMANCE=200 pytest tests/serving` asks 200 requests of up to 800 tokens. Where K/V are propagated two of them
differ by rounding: docs/measurements/serving.md.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from conformance import REQUEST_SECONDS, Answer, Item, by_http, by_scheduler, check, expected, items_of
from running_server import Running

from tide_export.runtime.engine import Engine, load


@pytest.fixture(scope="module", params=["exact", "propagating"])
def bundle(request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue("demo_bundle" if request.param == "exact" else "propagating_bundle")


@pytest.fixture(scope="module")
def engine(bundle: Path) -> Engine:
    return load(bundle, provider="cpu", threads=1)


@pytest.fixture(scope="module")
def asked(engine: Engine, demo_text_ids: list[int]) -> tuple[list[Item], list[Answer]]:
    items = items_of(engine, demo_text_ids)
    return items, expected(engine, items)


@pytest.fixture(scope="module")
def server(bundle: Path) -> Iterator[Running]:
    running = Running(bundle, waiting=64, request_seconds=REQUEST_SECONDS)
    yield running
    running.stop()


def test_the_requests_are_of_all_kinds(asked: tuple[list[Item], list[Answer]]) -> None:
    items, answers = asked
    assert {item.options["mode"] for item in items} >= {"full", "exit"}
    assert len(frozenset().union(*(answer.exits for answer in answers))) >= 3
    assert any(item.leaves_after for item in items)
    assert any(len(answer.text) > 40 for answer in answers)
    ended = [(answer.finish_reason, bool(item.stops)) for item, answer in zip(items, answers, strict=True)]
    assert {("stop", True), ("length", False)} <= set(ended)


def test_the_scheduler(engine: Engine, asked: tuple[list[Item], list[Answer]]) -> None:
    check(by_scheduler(engine), *asked)


def test_the_http_server(server: Running, asked: tuple[list[Item], list[Answer]]) -> None:
    server.http.timeout = REQUEST_SECONDS
    check(by_http(server.http, "demo"), *asked)
    assert server.idle()
