"""A real Ray Serve gives the engine's tokens. Not in CI, as Ray takes half a minute to start and 490 MB:

pip install -e '.[ray]' && TIDE_TEST_RAY=1 pytest tests/serving/test_ray.py
"""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from conformance import REQUEST_SECONDS, by_http, check, expected, items_of
from running_server import free_port

from tide_export.errors import ConfigError
from tide_export.runtime.engine import load

if not os.environ.get("TIDE_TEST_RAY"):
    pytest.skip("TIDE_TEST_RAY=1 runs a real Ray Serve", allow_module_level=True)
ray = pytest.importorskip("ray")
SECONDS = 120  # to be ready


@pytest.fixture(scope="module")
def client(demo_bundle: Path) -> Iterator[httpx.Client]:
    from ray import serve

    from tide_export.serving.ray import application

    port = free_port()
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    options = {"slots": "3", "threads": "1", "model_name": "demo", "min_replicas": "2", "max_replicas": "2"}
    options["request_seconds"] = str(REQUEST_SECONDS)
    serve.run(application({"bundle": str(demo_bundle)} | options))
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=REQUEST_SECONDS) as http:
        yield http
    serve.shutdown()
    ray.shutdown()


def test_it_gives_the_engine_s_tokens(client: httpx.Client, demo_bundle: Path, demo_text_ids: list[int]) -> None:
    engine = load(demo_bundle, provider="cpu", threads=1)
    items = items_of(engine, demo_text_ids)
    check(by_http(client, "demo"), items, expected(engine, items), engine)


def test_errors_and_health_are_the_server_s(client: httpx.Client) -> None:
    assert client.get("/ready").json() == {"status": "ready"}
    answer = client.post("/v1/completions", json={"model": "other", "prompt": "a"})
    assert (answer.status_code, answer.json()["error"]["type"]) == (404, "not_found_error")


def test_a_killed_replica_is_replaced(client: httpx.Client) -> None:
    body = {"model": "demo", "prompt": "x", "max_tokens": 900, "temperature": 0, "stream": True}
    with client.stream("POST", "/v1/completions", json=body) as stream:
        lines = stream.iter_lines()
        next(lines)
        for name in [one["name"] for one in ray.util.list_named_actors(all_namespaces=True)]:
            if "#tide#" in name:
                ray.kill(ray.get_actor(name, namespace="serve"))
        with pytest.raises(httpx.RemoteProtocolError):
            assert "data: [DONE]" not in list(lines)
    until, short = time.monotonic() + SECONDS, body | {"max_tokens": 1, "stream": False}
    while (answer := client.post("/v1/completions", json=short)).status_code != 200:
        assert time.monotonic() < until, answer.text
        time.sleep(0.2)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({}, "bundle=FOLDER is missing"),
        ({"bundle": "b", "slots": "0"}, "slots: Input should be greater than or equal to 1"),
        ({"bundle": "b", "slot": "3"}, "slot: Extra inputs are not permitted"),
        ({"bundle": "b", "max_replicas": "many"}, "invalid literal"),
    ],
)
def test_wrong_arguments_are_one_sentence(arguments: dict[str, Any], reason: str) -> None:
    from tide_export.serving.ray import application

    with pytest.raises(ConfigError, match=reason):
        application(arguments)
